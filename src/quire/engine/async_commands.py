"""Commands for the thread of an engine: start a request, abort one, run a function between two steps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.engine.delta_pacer import DeltaPacer
from quire.engine.engine import Engine
from quire.engine.outputs.outputs import RequestOutput
from quire.structured.grammar_cache import Grammar

# Item of a request's stream: a delta of its output, or the error that ends it.
Item = RequestOutput | Exception


@dataclass(slots=True, eq=False)
class Stream:
    """One request in the engine's thread, and the stream of its output deltas.

    Deltas that were not read yet are merged, so a slow reader holds at most one output.

    Args:
        request_id: id of the request.
        submit: function that adds the request to the engine.
        loop: event loop of the reading task.
        on_end: function that is called once the request has ended, before the next step; its error ends the stream.
        grammar: compiled grammar of the request, referenced until the request itself references it.

    Attributes:
        has_begun: True once an item was posted; the first one never waits for others.
    """

    request_id: str
    submit: Callable[[Engine], None]
    loop: asyncio.AbstractEventLoop
    on_end: Callable[[Engine], None] | None = None
    grammar: Grammar | None = None
    has_begun: bool = False
    _delta: RequestOutput | None = None
    _error: Exception | None = None
    _has_item: asyncio.Event = field(default_factory=asyncio.Event)

    async def next(self) -> RequestOutput:
        """Wait for the next delta and return it.

        Raises:
            Exception: the error that ended the stream, after all deltas.
        """
        await self._has_item.wait()
        delta, self._delta = self._delta, None
        if delta is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._has_item.clear()
        return delta

    def put(self, item: Item) -> None:
        """Add an item; called on the event loop."""
        if isinstance(item, Exception):
            self._error = item
        elif self._delta is None:
            self._delta = item
        else:
            self._delta.add(item)
        self._has_item.set()


def post_items(items: Iterable[tuple[Stream, Item]], pacer: DeltaPacer | None = None) -> None:
    """Add items to their streams from the engine's thread, with one call for each event loop.

    Args:
        items: streams with their items, in order.
        pacer: pacer that measures the loops' work; None measures nothing.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Item]]] = {}
    for stream, item in items:
        by_loop.setdefault(stream.loop, []).append((stream, item))
    for loop, loop_items in by_loop.items():
        # The loop may have closed already; then no task reads the stream.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_put_all, loop_items, pacer)


def _put_all(items: list[tuple[Stream, Item]], pacer: DeltaPacer | None) -> None:
    if pacer is not None:
        pacer.on_arrival()
    for stream, item in items:
        stream.put(item)


class Abort(NamedTuple):
    """Aborts a stream's request; it has the stream, since another request may have taken its id."""

    stream: Stream


@dataclass(slots=True, eq=False)
class Call:
    """A function to run between two steps.

    Args:
        run: the function.
        answer: future for the result or the error; None where no task waits.
    """

    run: Callable[[Engine], Any]
    answer: asyncio.Future[Any] | None = None

    def execute(self, engine: Engine) -> None:
        """Run the function in the engine's thread; an error goes to `answer`."""
        if self.answer is None:
            self.run(engine)
            return
        try:
            result = self.run(engine)
        except Exception as error:
            self.fail(error)
        else:
            self._answer(self.answer.set_result, result)

    def fail(self, error: Exception) -> None:
        """Set the error of a function that was not run."""
        if self.answer is not None:
            self._answer(self.answer.set_exception, error)

    def _answer(self, setter: Callable[[Any], None], value: Any) -> None:
        answer = self.answer
        assert answer is not None

        def set_answer() -> None:
            # The waiting task may have been cancelled.
            if not answer.done():
                setter(value)

        with contextlib.suppress(RuntimeError):
            answer.get_loop().call_soon_threadsafe(set_answer)
