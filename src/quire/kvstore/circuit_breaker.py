"""A circuit breaker: a service that fails is left alone for a while, and asked by one caller at a time after that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

MOST_FAILURES = 3
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


class CircuitBreaker:
    """Decides whether a service is asked. Open after some failures in a row; each further failure doubles the pause.

    Args:
        clock: clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._closed_from_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the service is left alone now."""
        with self._lock:
            return self._num_failures >= MOST_FAILURES and self._clock() < self._closed_from_s

    def allows(self) -> bool:
        """Return whether to ask the service now; after a pause, True is the answer to one caller in each pause."""
        with self._lock:
            if self._num_failures < MOST_FAILURES:
                return True
            now = self._clock()
            if now < self._closed_from_s:
                return False
            self._closed_from_s = now + self._pause_s
            return True

    def succeeded(self) -> None:
        """Close the circuit."""
        with self._lock:
            self._num_failures = 0

    def failed(self) -> None:
        """Count a failure, and open the circuit after some in a row."""
        with self._lock:
            self._num_failures += 1
            self._closed_from_s = self._clock() + self._pause_s

    @property
    def _pause_s(self) -> float:
        power = min(max(0, self._num_failures - MOST_FAILURES), 16)
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * float(2**power))
