"""Pacing of the deltas that are sent to event loops, which leaves most of the GIL's time to the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# Greatest share of the time that an event loop may take for its deltas.
LOOP_SHARE = 1 / 8
MAX_HOLD_S = 0.05


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
