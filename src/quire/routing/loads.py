"""The work that a router has given to each replica and that is not done yet, in tokens."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

# Weight of the latest measurement of a replica's speed.
SPEED_WEIGHT = 0.1
# Bounds of a measured speed, as multiples of the one before: one slow start says little.
SPEED_BOUNDS = (0.25, 4.0)
# Fewer tokens measure the overhead of a step.
MIN_MEASURED = 64


@dataclass(slots=True)
class ReplicaLoad:
    """The work of one replica.

    Args:
        seconds_per_token: time to compute a token of a prompt.

    Attributes:
        pending_tokens: tokens of prompts to be computed, of requests without an answer yet.
        num_streams: requests whose answer has begun.
        num_requests: requests so far.
        computed_tokens: tokens of prompts that were given to it and that it was not expected to have.
        other_tokens: tokens that requests of other routers add to its queue.
        is_available: False while it takes no requests.
        version: rises with each change.
    """

    seconds_per_token: float
    pending_tokens: int = 0
    num_streams: int = 0
    num_requests: int = 0
    computed_tokens: int = 0
    other_tokens: int = 0
    is_available: bool = True
    version: int = 0

    def measure(self, seconds: float, num_tokens: int) -> None:
        """Adjust the time of a token to a request that waited for some tokens and was then computed itself."""
        if num_tokens >= MIN_MEASURED and seconds > 0:
            low, high = (bound * self.seconds_per_token for bound in SPEED_BOUNDS)
            measured = min(max(seconds / num_tokens, low), high)
            self.seconds_per_token += SPEED_WEIGHT * (measured - self.seconds_per_token)


class LoadOrder:
    """The replicas in the order of their queues, without a look at each of them.

    Args:
        stream_tokens: tokens of a prompt that take as long as what a stream adds to the wait of others.
    """

    def __init__(self, stream_tokens: int) -> None:
        self.loads: dict[int, ReplicaLoad] = {}
        self._stream_tokens = stream_tokens
        # (queue in seconds, computed tokens, replica, version); entries of older versions are void.
        self._heap: list[tuple[float, int, int, int]] = []

    def own_tokens(self, replica: int) -> int:
        """Return the length of a replica's queue in tokens of prompts, without requests of other routers."""
        load = self.loads[replica]
        return load.pending_tokens + load.num_streams * self._stream_tokens

    def queue_s(self, replica: int) -> float:
        """Return the time until a replica could begin with another prompt."""
        load = self.loads[replica]
        return (self.own_tokens(replica) + load.other_tokens) * load.seconds_per_token

    def update(self, replica: int) -> None:
        """Record that the load of a replica has changed."""
        load = self.loads[replica]
        load.version += 1
        if load.is_available:
            heapq.heappush(self._heap, self._entry(replica, load))
        if len(self._heap) > 4 * len(self.loads) + 64:
            self._heap = [self._entry(each, known) for each, known in self.loads.items() if known.is_available]
            heapq.heapify(self._heap)

    def least(self, count: int, excluded: frozenset[int]) -> list[int]:
        """Return the available replicas with the shortest queues; of equal ones, those that computed least."""
        found: list[int] = []
        popped: list[tuple[float, int, int, int]] = []
        while self._heap and len(found) < count:
            entry = heapq.heappop(self._heap)
            load = self.loads.get(entry[2])
            if load is None or load.version != entry[3] or not load.is_available:
                continue
            popped.append(entry)
            if entry[2] not in excluded:
                found.append(entry[2])
        for entry in popped:
            heapq.heappush(self._heap, entry)
        return found

    def _entry(self, replica: int, load: ReplicaLoad) -> tuple[float, int, int, int]:
        return (self.queue_s(replica), load.computed_tokens, replica, load.version)
