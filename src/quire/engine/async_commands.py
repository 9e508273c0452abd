"""What the thread of an engine is told: to start a request, to end one, to do something between two steps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.engine.engine import Engine
from quire.engine.outputs.outputs import RequestOutput
from quire.structured.grammar_cache import Grammar

# What goes to who follows a request: delta of it, or the error that ends it.
Item = RequestOutput | Exception


@dataclass(slots=True, eq=False)
class Stream:
    """One request on its way through the engine's thread, and what is new of it.

    News that nobody has taken yet are merged, so a reader that is slow holds no more than one output.

    Args:
        submit: starts the request.
        loop: the event loop of the task that follows.
        on_end: done once the request has ended, before the next step; its error ends the stream.
        grammar: what its request needs compiled, held until the request holds it.
    """

    request_id: str
    submit: Callable[[Engine], None]
    loop: asyncio.AbstractEventLoop
    on_end: Callable[[Engine], None] | None = None
    grammar: Grammar | None = None
    _delta: RequestOutput | None = None
    _error: Exception | None = None
    _has_item: asyncio.Event = field(default_factory=asyncio.Event)

    async def next(self) -> RequestOutput:
        """Return what is new, as soon as something is.

        Raises:
            Exception: what ended the stream, once all delta were taken.
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
        """Take an item, on the event loop."""
        if isinstance(item, Exception):
            self._error = item
        elif self._delta is None:
            self._delta = item
        else:
            self._delta.add(item)
        self._has_item.set()


def post_items(items: Iterable[tuple[Stream, Item]]) -> None:
    """Hand items to the tasks that follow their streams, from the engine's thread: one call for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Item]]] = {}
    for stream, item in items:
        by_loop.setdefault(stream.loop, []).append((stream, item))
    for loop, loop_items in by_loop.items():
        # The loop may have closed under a task that is being torn down; there is nobody left to tell.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_put_all, loop_items)


def _put_all(items: list[tuple[Stream, Item]]) -> None:
    for stream, item in items:
        stream.put(item)


class Abort(NamedTuple):
    """Ends a stream's request; it names the stream, since another request may have taken its id."""

    stream: Stream


@dataclass(slots=True, eq=False)
class Call:
    """Something to do between two steps, and who waits for it.

    Args:
        run: what to do.
        answer: gets the result or the error; None where nobody waits.
    """

    run: Callable[[Engine], Any]
    answer: asyncio.Future[Any] | None = None

    def execute(self, engine: Engine) -> None:
        """Do it, from the engine's thread; what goes wrong goes back to who waits."""
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
        """Tell who waits that it was not done."""
        if self.answer is not None:
            self._answer(self.answer.set_exception, error)

    def _answer(self, setter: Callable[[Any], None], value: Any) -> None:
        answer = self.answer
        assert answer is not None

        def set_answer() -> None:
            # Whoever waited may have been cancelled.
            if not answer.done():
                setter(value)

        with contextlib.suppress(RuntimeError):
            answer.get_loop().call_soon_threadsafe(set_answer)
