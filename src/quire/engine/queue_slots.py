"""Slots of the waiting queue, reserved before requests are prepared."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from quire.errors import InvalidParameter, QueueFull

LONGEST_RETRY_S = 60
# Weight of the last interval in the mean time between two requests that end.
WEIGHT = 1 / 16


class SlotReservation:
    """Reserved slots of the waiting queue; unused ones are released on exit."""

    def __init__(self, return_slots: Callable[[int], None], count: int) -> None:
        self._return_slots = return_slots
        self._count = count

    def take(self) -> None:
        """Use one slot; from now on the request itself counts as waiting."""
        if not self._count:
            raise ValueError("more requests than reserved slots")
        self._count -= 1
        self._return_slots(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._return_slots(self._count)
        self._count = 0


class DepartureRate:
    """Measures the rate at which requests end while others wait, which equals the rate of admissions."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._interval_s: float | None = None
        # Time of the last end with requests waiting; the next end closes the interval.
        self._last_s: float | None = None

    def note(self, num_waiting: int) -> None:
        """Record the end of a request; `num_waiting` requests wait at that time."""
        now = self._clock()
        if self._last_s is not None:
            interval_s, average_s = now - self._last_s, self._interval_s
            self._interval_s = interval_s if average_s is None else average_s + (interval_s - average_s) * WEIGHT
        self._last_s = now if num_waiting else None

    def wait_s(self, num_waiting: int) -> int:
        """Return the whole seconds until a queue of this length is empty; 1 before the first measurement."""
        interval_s, last_s = self._interval_s or 0.0, self._last_s
        if last_s is not None:
            # No request has ended since `last_s`: the current interval is at least this long.
            interval_s = max(interval_s, self._clock() - last_s)
        return max(1, min(LONGEST_RETRY_S, math.ceil(interval_s * num_waiting)))


class QueueSlots:
    """Counts the slots of the waiting queue; thread-safe.

    Args:
        limit: number of slots; None for no limit.
        num_queued: function that returns the number of requests waiting in the scheduler.
        clock: seconds, monotonic.

    Attributes:
        num_unstarted: number of requests that were submitted, but neither started nor refused yet.
    """

    def __init__(
        self, limit: int | None, num_queued: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_unstarted = 0
        self._limit = limit
        self._num_queued = num_queued
        self._departures = DepartureRate(clock)
        self._num_reserved = 0
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait, submitted ones included."""
        return self._num_queued() + self.num_unstarted

    def reserve(self, count: int) -> SlotReservation:
        """Reserve slots.

        Raises:
            InvalidParameter: the queue has fewer slots in all.
            QueueFull: fewer slots are free; nothing is reserved.
        """
        if self._limit is not None and count > self._limit:
            allowed = f"at most {self._limit} prompts, as many as may wait (max_queue_len)"
            raise InvalidParameter("prompt", f"{count} prompts", allowed)
        with self._lock:
            self._check(count)
            self._num_reserved += count
        return SlotReservation(self._give_back, count)

    def check(self) -> None:
        """Check that a slot is free.

        Raises:
            QueueFull: no slot is free.
        """
        self._check(1)

    def put(self) -> None:
        """Count a submitted request."""
        with self._lock:
            self.num_unstarted += 1

    def start(self) -> None:
        """Count a submitted request as started, or refused."""
        with self._lock:
            self.num_unstarted -= 1

    def end(self) -> None:
        """Record the end of a started request."""
        self._departures.note(self._num_queued())

    def _check(self, count: int) -> None:
        num_taken = self.num_waiting + self._num_reserved
        if self._limit is not None and num_taken + count > self._limit:
            raise QueueFull(self._limit, self._departures.wait_s(num_taken))

    def _give_back(self, count: int) -> None:
        with self._lock:
            self._num_reserved -= count
