"""Places in the waiting queue, held for requests to come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from quire.errors import QueueFull


class Reservation:
    """Places in the waiting queue, held before any work is done for a request; unused ones return on exit.

    Args:
        return_places: takes back so many.
        count: how many are held.
    """

    def __init__(self, return_places: Callable[[int], None], count: int) -> None:
        self._return_places = return_places
        self._count = count

    def take(self) -> None:
        """Use one place; from now on the request itself counts as waiting.

        Raises:
            ValueError: none is left.
        """
        if not self._count:
            raise ValueError("more requests than reserved places")
        self._count -= 1
        self._return_places(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._return_places(self._count)
        self._count = 0


class Places:
    """Counts the places of the waiting queue, from any thread.

    Args:
        limit: how many there are; None for as many as are asked for.
        retry_after_s: what those who find none are told.
        num_queued: says how many requests wait in the scheduler.

    Attributes:
        num_unstarted: requests that were put, but neither started nor refused yet.
    """

    def __init__(self, limit: int | None, retry_after_s: int, num_queued: Callable[[], int]) -> None:
        self.num_unstarted = 0
        self._limit = limit
        self._retry_after_s = retry_after_s
        self._num_queued = num_queued
        self._num_reserved = 0
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Requests that wait, those on their way to the scheduler among them."""
        return self._num_queued() + self.num_unstarted

    def reserve(self, count: int) -> Reservation:
        """Hold places.

        Raises:
            QueueFull: fewer are left; nothing is held.
        """
        with self._lock:
            if self._limit is not None and self.num_waiting + self._num_reserved + count > self._limit:
                raise QueueFull(self._limit, self._retry_after_s)
            self._num_reserved += count
        return Reservation(self._give_back, count)

    def put(self) -> None:
        """Note that a request is on its way."""
        with self._lock:
            self.num_unstarted += 1

    def start(self) -> None:
        """Note that a request was started, or refused."""
        with self._lock:
            self.num_unstarted -= 1

    def _give_back(self, count: int) -> None:
        with self._lock:
            self._num_reserved -= count
