"""The retry budget: how many requests may be sent to another server, so that retries do not overload what is left.

Finagle's budget is a share of the requests of the last seconds and a number per second; Envoy's a share of those in
flight. The larger share counts here: requests to a language model are few and long, so many may be in flight whose
beginning is long ago.
"""

from __future__ import annotations

from quire.fleet.routing.ejection import WINDOW_S, RecentCounts


class RetryBudget:
    """The retries of all requests.

    Args:
        share: retries of the last seconds as a share of the requests in that time or in flight.
        min_per_s: retries per second in addition.

    Attributes:
        num_refused: retries that were not allowed.
    """

    def __init__(self, share: float, min_per_s: float) -> None:
        self.num_refused = 0
        self._share = share
        self._min_per_s = min_per_s
        self._recent = RecentCounts()

    def add_request(self, now_s: float) -> None:
        """Count a request of a client."""
        self._recent.add(now_s, 1, 0)

    def take(self, num_in_flight: int, now_s: float) -> bool:
        """Return whether a request may be sent to another server, and count this retry if it may."""
        is_allowed = self.num_left(num_in_flight, now_s) >= 1
        if is_allowed:
            self._recent.add(now_s, 0, 1)
        else:
            self.num_refused += 1
        return is_allowed

    def num_left(self, num_in_flight: int, now_s: float) -> float:
        """Return the number of retries that are allowed now."""
        num_requests, num_retries = self._recent.sums(now_s)
        return self._share * max(num_requests, num_in_flight) + self._min_per_s * WINDOW_S - num_retries
