"""Commands for the thread of an engine, and the deltas that it posts to event loops.

A command starts a request, aborts one, or runs a function between two steps. Deltas are paced, so that the engine has
most of the GIL's time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.engine.engine import Engine
from quire.engine.outputs.mailbox import Item
from quire.text.structured.local_grammars import HeldGrammar

# Greatest share of the time that an event loop may take for its deltas.
LOOP_SHARE = 1 / 8
MAX_HOLD_S = 0.05


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


class DeltaPacer:
    """Decides whether tokens are held back until the next step before they are posted to event loops.

    The tokens of several steps make one delta of a stream, which costs little more than the delta of one step. The
    interval between two posts is the CPU time that the loop took since the last post, divided by `LOOP_SHARE`: a loop
    that serves few streams gets the deltas of each step, a loop that serves many gets several steps' at once.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, thread_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self._thread_clock = thread_clock
        # Processor time of each loop's thread at its last post.
        self._used_s: dict[int, float] = {}
        self._interval_s = 0.0
        self._posted_s = clock()

    def may_hold(self) -> bool:
        """Return whether tokens should be held until the next step; called by the engine's thread."""
        return self._clock() - self._posted_s < self._interval_s

    def on_post(self) -> None:
        """Record that deltas are posted; called by the engine's thread."""
        self._posted_s = self._clock()

    def on_arrival(self) -> None:
        """Measure the loop's work since the last post; called by the loop's thread, before its work on the new one."""
        thread, used_s = threading.get_ident(), self._thread_clock()
        busy_s = used_s - self._used_s.get(thread, used_s)
        self._used_s[thread] = used_s
        self._interval_s = min(MAX_HOLD_S, busy_s / LOOP_SHARE)


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
