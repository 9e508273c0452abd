"""Outlier ejection: a server that fails more than the others gets no requests for a time. Times are arguments.

A server is ejected after some failures in a row, or by its share of failures in the last seconds; then its breaker is
open. It is not ejected if the other servers that get requests fail about as often, because then the requests, or
something that all servers depend on, are at fault; nor if too large a share of the servers would be ejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire.fleet.routing.breaker import Breaker, BreakerState
from quire.fleet.routing.failure_policy import FailurePolicy

# Time over which requests and failures are counted, and the number of requests below which shares mean nothing.
WINDOW_S: Final = 10.0
MIN_REQUESTS: Final = 10
# A server stands out if the others' share of failures is at most this part of its own.
STANDS_OUT: Final = 0.5


class RecentCounts:
    """Numbers of requests, and of those of one kind, in the last `WINDOW_S` to 1.5 `WINDOW_S` seconds."""

    def __init__(self) -> None:
        # Number of the half window, and counts of it and of the two before.
        self._half = 0
        self._counts = [(0, 0), (0, 0), (0, 0)]

    def add(self, now_s: float, num_requests: int, num_of_kind: int) -> None:
        """Add requests."""
        self._advance(now_s)
        requests, of_kind = self._counts[-1]
        self._counts[-1] = (requests + num_requests, of_kind + num_of_kind)

    def sums(self, now_s: float) -> tuple[int, int]:
        """Return the number of requests, and of those of the kind."""
        self._advance(now_s)
        return sum(count[0] for count in self._counts), sum(count[1] for count in self._counts)

    def _advance(self, now_s: float) -> None:
        half = int(now_s / (WINDOW_S / 2))
        num_past = min(max(0, half - self._half), len(self._counts))
        self._counts = self._counts[num_past:] + [(0, 0)] * num_past
        self._half = max(half, self._half)


class Ejector:
    """The breakers of all servers, and the rule that opens them.

    Args:
        policy: numbers of the rule.
    """

    def __init__(self, policy: FailurePolicy) -> None:
        self.breakers: dict[str, Breaker] = {}
        self._policy = policy
        self._recent: dict[str, RecentCounts] = {}

    def add(self, name: str) -> Breaker:
        """Add a server and return its breaker."""
        policy = self._policy
        self._recent[name] = RecentCounts()
        breaker = Breaker(policy.eject_failures, policy.eject_time_s, policy.max_eject_time_s)
        self.breakers[name] = breaker
        return breaker

    def succeed(self, name: str, now_s: float, *, is_trial: bool = False) -> None:
        """Record that a server has answered a request."""
        self._recent[name].add(now_s, 1, 0)
        self.breakers[name].succeed(now_s, is_trial=is_trial)

    def fail(self, name: str, others: Sequence[str], now_s: float, *, is_trial: bool = False) -> bool:
        """Record that a server has failed, and eject it if the rule says so.

        Args:
            name: name of the server.
            others: names of the other servers that are up.
            now_s: current time in seconds, monotonic.
            is_trial: True if the request was the trial of the server's breaker.

        Returns:
            True if the server is ejected by this failure.
        """
        breaker = self.breakers[name]
        self._recent[name].add(now_s, 1, 1)
        is_enough = breaker.fail(now_s, is_trial=is_trial)
        if is_trial or breaker.state(now_s) is not BreakerState.CLOSED:
            return is_trial
        num_requests, num_failed = self._recent[name].sums(now_s)
        is_enough |= num_requests >= MIN_REQUESTS and num_failed >= self._policy.eject_rate * num_requests
        closed = [other for other in others if self.breakers[other].state(now_s) is BreakerState.CLOSED]
        is_enough = is_enough and self._has_room(len(others), len(closed))
        if not is_enough or self._rate_of(closed, now_s) > STANDS_OUT * num_failed / num_requests:
            return False
        breaker.open(now_s)
        return True

    def _has_room(self, num_others: int, num_closed: int) -> bool:
        """Return whether another server may be ejected; one may be wherever there is another one for its requests."""
        most = min(max(1, int(self._policy.max_ejected * (num_others + 1))), num_others)
        return self._policy.max_ejected > 0 and num_others - num_closed < most

    def _rate_of(self, names: Sequence[str], now_s: float) -> float:
        """Return the share of failures among the recent requests of some servers together."""
        sums = [self._recent[name].sums(now_s) for name in names]
        return sum(failed for _, failed in sums) / max(1, sum(requests for requests, _ in sums))
