"""The pace of deltas on their way to event loops: it leaves most of the interpreter's lock to the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# An event loop may take this share of the time for the deltas that it is sent.
LOOP_SHARE = 1 / 8
# A front process has no interpreter's lock in common with the engine, but maybe a core.
FRONT_SHARE = 1 / 4
MAX_HOLD_S = 0.05


class DeltaPacer:
    """Decides whether tokens wait for those of the next step before they are posted to event loops.

    The tokens of several steps are one delta of a stream, which costs little more than that of one. The interval
    between two posts is the processor time that the loop took since the post before, divided by `LOOP_SHARE`: one that
    serves a few streams gets each step's deltas, one that serves many gets several steps' at once.

    Args:
        clock: seconds, monotonic.
        thread_clock: processor time of the calling thread, in seconds.
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
        """Return whether tokens should wait for those of the next step; called by the engine's thread."""
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

    def on_report(self, busy_s: float) -> None:
        """Take the processor time that another process took since the last post to it."""
        self._interval_s = min(MAX_HOLD_S, busy_s / FRONT_SHARE)
