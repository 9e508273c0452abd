"""Places in the waiting queue, held for requests to come."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from quire.errors import InvalidParameter, QueueFull

LONGEST_RETRY_S = 60
# Of the mean time between two requests that leave, what the last one counts.
WEIGHT = 1 / 16


class SlotReservation:
    """Places in the waiting queue, held before any work is done for a request; unused ones return on exit.

    Args:
        return_slots: takes back so many.
        count: how many are held.
    """

    def __init__(self, return_slots: Callable[[int], None], count: int) -> None:
        self._return_slots = return_slots
        self._count = count

    def take(self) -> None:
        """Use one place; from now on the request itself counts as waiting.

        Raises:
            ValueError: none is left.
        """
        if not self._count:
            raise ValueError("more requests than reserved places")
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
    """Measures how often a request ends while others wait: so often one of those gets its turn.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._interval_s: float | None = None
        # The last one that left somebody waiting; what follows it says how long that one waited for its turn.
        self._last_s: float | None = None

    def note(self, num_waiting: int) -> None:
        """Note that a request has ended, and how many wait now."""
        now = self._clock()
        if self._last_s is not None:
            interval_s, known = now - self._last_s, self._interval_s
            self._interval_s = interval_s if known is None else known + (interval_s - known) * WEIGHT
        self._last_s = now if num_waiting else None

    def wait_s(self, num_waiting: int) -> int:
        """Return whole seconds after which a queue of this length will be empty; 1 before anything was measured."""
        interval_s, last_s = self._interval_s or 0.0, self._last_s
        if last_s is not None:
            # None has ended since: the next one takes so long at least.
            interval_s = max(interval_s, self._clock() - last_s)
        return max(1, min(LONGEST_RETRY_S, math.ceil(interval_s * num_waiting)))


class QueueSlots:
    """Counts the places of the waiting queue, from any thread.

    Args:
        limit: how many there are; None for as many as are asked for.
        num_queued: says how many requests wait in the scheduler.
        clock: seconds, monotonic.

    Attributes:
        num_unstarted: requests that were put, but neither started nor refused yet.
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
        """Requests that wait, those on their way to the scheduler among them."""
        return self._num_queued() + self.num_unstarted

    def reserve(self, count: int) -> SlotReservation:
        """Hold places.

        Raises:
            InvalidParameter: there are never so many.
            QueueFull: fewer are left; nothing is held.
        """
        if self._limit is not None and count > self._limit:
            raise InvalidParameter("prompt", f"{count} prompts", f"at most {self._limit} prompts, as many as may wait")
        with self._lock:
            self._check(count)
            self._num_reserved += count
        return SlotReservation(self._give_back, count)

    def check(self) -> None:
        """See that a place is left.

        Raises:
            QueueFull: none is.
        """
        self._check(1)

    def put(self) -> None:
        """Note that a request is on its way."""
        with self._lock:
            self.num_unstarted += 1

    def start(self) -> None:
        """Note that a request was started, or refused."""
        with self._lock:
            self.num_unstarted -= 1

    def end(self) -> None:
        """Note that a request that was started has ended."""
        self._departures.note(self._num_queued())

    def _check(self, count: int) -> None:
        num_taken = self.num_waiting + self._num_reserved
        if self._limit is not None and num_taken + count > self._limit:
            raise QueueFull(self._limit, self._departures.wait_s(num_taken))

    def _give_back(self, count: int) -> None:
        with self._lock:
            self._num_reserved -= count
