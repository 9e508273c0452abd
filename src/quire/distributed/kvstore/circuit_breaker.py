"""A circuit breaker: a failing service is not called during a pause, and by one caller per pause after that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

MOST_FAILURES = 3
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


class CircuitBreaker:
    """Decides whether a service is called. Open after `MOST_FAILURES` in a row; each further one doubles the pause."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._closed_from_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the circuit is open: the service is not called now."""
        with self._lock:
            return self._num_failures >= MOST_FAILURES and self._clock() < self._closed_from_s

    def allows(self) -> bool:
        """Return whether to call the service now; after a pause, True for one caller (a trial), then a new pause."""
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
        """Count a failure; open the circuit after `MOST_FAILURES` in a row."""
        with self._lock:
            self._num_failures += 1
            self._closed_from_s = self._clock() + self._pause_s

    @property
    def _pause_s(self) -> float:
        power = min(max(0, self._num_failures - MOST_FAILURES), 16)
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * float(2**power))
