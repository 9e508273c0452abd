"""Commands for the thread of an engine: start a request, abort one, run a function between two steps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.engine.delta_pacer import DeltaPacer
from quire.engine.engine import Engine
from quire.engine.outputs.mailbox import Item
from quire.text.structured.local_grammars import HeldGrammar


@dataclass(slots=True, eq=False)
class Stream:
    """One request in the engine's thread, and the destination of its output deltas.

    Args:
        request_id: id of the request.
        submit: function that adds the request to the engine.
        loop: event loop of the reading task.
        deliver: function that takes an item, called on that loop.
        on_end: function that is called once the request has ended, before the next step; its error ends the stream.
        grammar: compiled grammar of the request, referenced until the request itself references it.
    """

    request_id: str
    submit: Callable[[Engine], None]
    loop: asyncio.AbstractEventLoop
    deliver: Callable[[Item], None]
    on_end: Callable[[Engine], None] | None = None
    grammar: HeldGrammar | None = None


def post_items(items: Iterable[tuple[Stream, Item]], pacer: DeltaPacer | None = None) -> None:
    """Send items from the engine's thread, with one call for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Item]]] = {}
    for stream, item in items:
        by_loop.setdefault(stream.loop, []).append((stream, item))
    for loop, loop_items in by_loop.items():
        # The loop may have closed already; then no task reads the streams.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_deliver_all, loop_items, pacer)


def _deliver_all(items: Sequence[tuple[Stream, Item]], pacer: DeltaPacer | None) -> None:
    if pacer is not None:
        pacer.on_arrival()
    for stream, item in items:
        stream.deliver(item)


class Abort(NamedTuple):
    """Aborts a stream's request; it names the stream, since another request may have reused the id."""

    stream: Stream


@dataclass(slots=True, eq=False)
class Call:
    """A function to run between two steps.

    Args:
        run: the function.
        answer: future for the result or the error; None if no task waits.
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
        """Set an error as the answer: the function's own, or the reason why it was not run."""
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
