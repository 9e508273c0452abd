"""A circuit breaker: whether one server is asked, by its failures. Times are arguments.

```
 closed    the server is asked
 open      it is not asked for a time, which doubles with each opening
 half-open its time is over: one request is the trial; its success closes the breaker, its failure opens it again
```
"""

from __future__ import annotations

from enum import Enum


class BreakerState(Enum):
    """State of a breaker; the values are shown to operators."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """The breaker of one server.

    Args:
        max_failures: failures in a row that are enough to open it.
        first_s: seconds of the first opening.
        longest_s: maximum of these seconds; a breaker that is closed for so long forgets one doubling.

    Attributes:
        num_failures: failures in a row.
        num_opened: number of times that it was opened.
    """

    def __init__(self, max_failures: int, first_s: float, longest_s: float) -> None:
        self.num_failures = 0
        self.num_opened = 0
        self._max_failures = max_failures
        self._first_s, self._longest_s = first_s, longest_s
        self._num_doublings = 0
        # Time at which it becomes half-open; None while it is closed.
        self._open_until_s: float | None = None
        self._closed_s = 0.0
        self._has_trial = False

    def state(self, now_s: float) -> BreakerState:
        """Return the present state."""
        if self._open_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._open_until_s else BreakerState.HALF_OPEN

    def allows(self, now_s: float) -> bool:
        """Return whether the server may be asked: one request at a time while the breaker is half-open."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._has_trial)

    def begin(self, now_s: float) -> bool:
        """Record that the server is asked; return whether this request is the trial."""
        is_trial = self.state(now_s) is BreakerState.HALF_OPEN and not self._has_trial
        self._has_trial |= is_trial
        return is_trial

    def succeed(self, now_s: float, *, is_trial: bool = False) -> None:
        """Record a success; requests from before an opening prove nothing about the server after it."""
        if is_trial:
            self._has_trial, self._open_until_s, self._closed_s = False, None, now_s
        if self._open_until_s is None:
            self.num_failures = 0

    def fail(self, now_s: float, *, is_trial: bool = False) -> bool:
        """Record a failure; return whether there are enough in a row to open the breaker.

        The failure of a trial opens it again.
        """
        if is_trial:
            self._has_trial = False
            self.open(now_s)
        if self._open_until_s is not None:
            return False
        self.num_failures += 1
        return self.num_failures >= self._max_failures

    def end_trial(self) -> None:
        """Record that the trial has ended without a result; the next request is the trial."""
        self._has_trial = False

    def open(self, now_s: float) -> None:
        """Have the server not asked for a time, twice as long as the last."""
        if self._open_until_s is None:
            forgotten = int((now_s - self._closed_s) / self._longest_s)
            self._num_doublings = max(0, self._num_doublings - forgotten)
        self._open_until_s = now_s + min(self._first_s * 2.0 ** min(self._num_doublings, 64), self._longest_s)
        self._num_doublings += 1
        self.num_opened += 1
        self.num_failures = 0
