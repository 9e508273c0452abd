"""When a server that has ended starts again."""

from __future__ import annotations

from typing import Final

FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 30.0
# A server that took requests for this long is healthy: the next delay is the first one again.
HEALTHY_S: Final = 60.0
MAX_FAILED_STARTS: Final = 5


class Restarts:
    """The delays of one server: they double up to a maximum, until it was healthy for a time."""

    def __init__(self) -> None:
        self._delay_s = FIRST_DELAY_S
        self._num_failed = 0

    def delay_s(self, served_s: float | None) -> float | None:
        """Return the delay before the next start; None after too many starts in a row that took no request.

        Args:
            served_s: time for which the server took requests before it ended; None if it ended before.
        """
        self._num_failed = self._num_failed + 1 if served_s is None else 0
        if self._num_failed >= MAX_FAILED_STARTS:
            return None
        if served_s is not None and served_s >= HEALTHY_S:
            self._delay_s = FIRST_DELAY_S
        delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, LONGEST_DELAY_S)
        return delay_s
