"""The unfinished work that a router has given to each replica, in tokens, and the time that tokens take."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import exp2

# Weights of the latest measurement in the speed of all replicas, after the first ones, and in a replica's slowness.
SPEED_WEIGHT, SLOWNESS_WEIGHT = 0.02, 0.03
# Bounds of a measurement, as multiples of the expected time, because one slow start means little.
MEASURED_BOUNDS = (0.25, 4.0)
# Minimum of a token's time, as a share of the mean time per token; the rest is the overhead of requests.
LEAST_SLOPE = 0.25
# Half-life of a replica's computed tokens, and of its difference in speed from the others, so that a replica without
# requests, which is not measured again, does not count as slow for ever.
HALF_LIFE_S = 60.0


class Speed:
    """Time to the first token of a request on any replica: a line fitted to measured requests, mostly the latest."""

    __slots__ = ("_moments", "_num_measured", "overhead_s", "seconds_per_token")

    def __init__(self, seconds_per_token: float) -> None:
        self.seconds_per_token = seconds_per_token
        self.overhead_s = 0.0
        # Means over requests with x tokens and y seconds: x, y, x * x, x * y.
        self._moments = (0.0, 0.0, 0.0, 0.0)
        self._num_measured = 0

    def expected_s(self, num_tokens: int) -> float:
        """Return the expected time for some tokens."""
        return self.overhead_s + num_tokens * self.seconds_per_token

    def measure(self, seconds: float, num_tokens: int) -> None:
        """Record the seconds to a request's first token, and the number of tokens computed until then, at least 1."""
        seconds = _bounded(seconds, self.expected_s(num_tokens))
        self._num_measured += 1
        weight = max(SPEED_WEIGHT, 1 / self._num_measured)
        latest = (num_tokens, seconds, num_tokens * num_tokens, num_tokens * seconds)
        self._moments = tuple(  # type: ignore[assignment]
            mean + weight * (new - mean) for mean, new in zip(self._moments, latest, strict=True)
        )
        tokens, mean_s, squares, products = self._moments
        ratio, variance = mean_s / tokens, squares - tokens * tokens
        slope = (products - tokens * mean_s) / variance if variance > 1 else ratio
        self.seconds_per_token = min(max(slope, LEAST_SLOPE * ratio), ratio)
        self.overhead_s = mean_s - self.seconds_per_token * tokens


@dataclass(slots=True)
class ReplicaLoad:
    """The work of one replica.

    Attributes:
        pending_tokens: tokens of prompts to compute, of requests whose answer has not begun.
        num_running: requests that have not ended, from the moment at which the replica was chosen.
        num_requests: requests so far.
        computed_tokens: tokens of its prompts that were not expected in its cache.
        recent_tokens: `computed_tokens` with the half-life `HALF_LIFE_S`, as of `given_s`.
        given_s: time of its last request.
        other_tokens: tokens that requests of other routers add to its queue.
        is_available: False while it takes no requests.
        version: number that rises with each change.
        slowness: its time for the same tokens, as a multiple of the others', as of `measured_s`; 1 before.
        measured_s: time of its last measurement.
    """

    pending_tokens: int = 0
    num_running: int = 0
    num_requests: int = 0
    computed_tokens: int = 0
    recent_tokens: float = 0.0
    given_s: float = 0.0
    other_tokens: int = 0
    is_available: bool = True
    version: int = 0
    slowness: float = 1.0
    measured_s: float = 0.0

    def recent_at(self, now_s: float) -> float:
        """Return the tokens that it was given to compute, weighted by recency."""
        return self.recent_tokens * _share_left(self.given_s, now_s)

    def give(self, num_tokens: int, now_s: float) -> None:
        """Add a prompt with `num_tokens` tokens to compute."""
        self.recent_tokens, self.given_s = self.recent_at(now_s) + num_tokens, now_s
        self.pending_tokens += num_tokens
        self.computed_tokens += num_tokens
        self.num_requests += 1
        self.num_running += 1

    def slowness_at(self, now_s: float) -> float:
        """Return the expected time of the replica, as a multiple of the others'."""
        return 1.0 + (self.slowness - 1.0) * _share_left(self.measured_s, now_s)

    def measure(self, seconds: float, expected_s: float, now_s: float) -> None:
        """Record the seconds to a request's first token, and the expected seconds on any replica."""
        before = self.slowness_at(now_s)
        self.slowness = before + SLOWNESS_WEIGHT * (_bounded(seconds, before * expected_s) / expected_s - before)
        self.measured_s = now_s


def _share_left(since_s: float, now_s: float) -> float:
    """Return the share of a value of `since_s` that is left after the decay until now."""
    return exp2(min(0.0, since_s - now_s) / HALF_LIFE_S)


def _bounded(seconds: float, expected_s: float) -> float:
    """Return measured seconds, limited to bounds around the expected seconds."""
    low, high = MEASURED_BOUNDS
    return min(max(seconds, low * expected_s), high * expected_s)


class LoadOrder:
    """The replicas in the order of their queues, in a heap."""

    def __init__(self, request_tokens: int, speed: Speed) -> None:
        self.loads: dict[int, ReplicaLoad] = {}
        self._speed = speed
        self._request_tokens = request_tokens
        # (queue, computed tokens, replica, version); entries of older versions are invalid.
        self._heap: list[tuple[float, int, int, int]] = []

    def own_tokens(self, replica: int) -> int:
        """Return the length of a replica's queue in tokens of prompts, without requests of other routers."""
        load = self.loads[replica]
        return load.pending_tokens + load.num_running * self._request_tokens

    def queue_tokens(self, replica: int) -> int:
        """Return the length of a replica's queue in tokens of prompts."""
        return self.own_tokens(replica) + self.loads[replica].other_tokens

    def queue_s(self, replica: int) -> float:
        """Return the time until a replica could begin with another prompt."""
        return self.queue_tokens(replica) * self._speed.seconds_per_token * self.loads[replica].slowness

    def update(self, replica: int) -> None:
        """Record that the load of a replica has changed."""
        load = self.loads[replica]
        load.version += 1
        if load.is_available:
            heapq.heappush(self._heap, self._entry(replica, load))
        if len(self._heap) > 4 * len(self.loads) + 64:
            self._heap = [self._entry(number, other) for number, other in self.loads.items() if other.is_available]
            heapq.heapify(self._heap)

    def least(self, count: int, excluded: frozenset[int]) -> list[int]:
        """Return the available replicas with the shortest queues; of equal queues, the fewest computed tokens first."""
        replicas: list[int] = []
        popped: list[tuple[float, int, int, int]] = []
        while self._heap and len(replicas) < count:
            entry = heapq.heappop(self._heap)
            load = self.loads.get(entry[2])
            if load is None or load.version != entry[3] or not load.is_available:
                continue
            popped.append(entry)
            if entry[2] not in excluded:
                replicas.append(entry[2])
        for entry in popped:
            heapq.heappush(self._heap, entry)
        return replicas

    def _entry(self, replica: int, load: ReplicaLoad) -> tuple[float, int, int, int]:
        return (self.queue_tokens(replica) * load.slowness, load.computed_tokens, replica, load.version)
