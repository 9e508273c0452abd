"""The choice of a replica for each request of a simulation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import Protocol

from quire.measurement.simulation.replicas.tokens import TokenSpan
from quire.measurement.simulation.request import SimulatedRequest
from quire.memory.manager import KVCacheManager


class ReplicaLoads:
    """The number of unfinished requests of each replica, and the replica with the fewest."""

    __slots__ = ("_heaps", "_listed", "_lowest", "counts")

    def __init__(self, num_replicas: int) -> None:
        self.counts = [0] * num_replicas
        # Number of requests -> heap of replicas with this number. Replicas whose number has changed stay until they are
        # popped; `_listed` has the content of each heap, so that no replica is added twice.
        self._heaps: list[list[int]] = [list(range(num_replicas))]
        self._listed = [set(range(num_replicas))]
        # A lower bound of the number of requests of any replica.
        self._lowest = 0

    def set(self, idx: int, count: int) -> None:
        """Set the number of unfinished requests of a replica."""
        if self.counts[idx] == count:
            return
        self.counts[idx] = count
        while len(self._heaps) <= count:
            self._heaps.append([])
            self._listed.append(set())
        if idx not in self._listed[count]:
            self._listed[count].add(idx)
            heappush(self._heaps[count], idx)
        self._lowest = min(self._lowest, count)

    def least(self) -> int:
        """Return the first replica with the fewest unfinished requests."""
        counts = self.counts
        while True:
            count = self._lowest
            heap, listed = self._heaps[count], self._listed[count]
            while heap:
                idx = heap[0]
                if counts[idx] == count:
                    return idx
                listed.remove(heappop(heap))
            self._lowest += 1


class RouterView(Protocol):
    """The state of the fleet at the arrival of a request, for routers."""

    @property
    def loads(self) -> ReplicaLoads:
        """Numbers of unfinished requests."""

    def hit_tokens(self, idx: int) -> int:
        """Return the number of prompt tokens that a replica would reuse; costs a lookup in its memory manager."""

    def token_ids(self) -> list[int]:
        """Return the token ids of the prompt."""


class SimulatedRouter(ABC):
    """Chooses a replica for a request; the base of all routers, most of which need `choose` only.

    Attributes:
        follows_events: True if the router uses the KV events of each step.
    """

    follows_events = False

    @abstractmethod
    def choose(self, request: SimulatedRequest, view: RouterView, now_s: float) -> int:
        """Return the index of a replica.

        Args:
            request: request that has arrived.
            view: state of the fleet.
            now_s: present time.
        """

    def on_replica(self, idx: int, memory: KVCacheManager) -> None:  # noqa: B027
        """Handle a new replica and its memory manager, before its first request."""

    def on_step_results(self, idx: int, now_s: float) -> None:  # noqa: B027
        """Handle the results of a step, before the next one is planned."""

    def on_first_token(self, request: SimulatedRequest, idx: int, now_s: float) -> None:  # noqa: B027
        """Handle the first token of a request."""

    def on_end(self, request: SimulatedRequest, idx: int, now_s: float) -> None:  # noqa: B027
        """Handle the end of a request, or its rejection."""


class RoundRobin(SimulatedRouter):
    """Sends requests to the replicas in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: SimulatedRequest, view: RouterView, now_s: float) -> int:  # noqa: ARG002
        """Return the next replica."""
        idx = self._next
        self._next = (idx + 1) % len(view.loads.counts)
        return idx


class LeastLoaded(SimulatedRouter):
    """Sends a request to the replica with the fewest unfinished requests."""

    def choose(self, request: SimulatedRequest, view: RouterView, now_s: float) -> int:  # noqa: ARG002
        """Return the replica with the fewest unfinished requests."""
        return view.loads.least()


class PrefixAware(SimulatedRouter):
    """Weighs the tokens that a replica would reuse against its unfinished requests.

    Candidates are replicas that lately got prompts with the same beginning, and the least loaded replica.
    """

    def __init__(
        self, tokens_per_request: float = 128.0, max_candidates: int = 4, max_beginnings: int = 1 << 20
    ) -> None:
        self._tokens_per_request = tokens_per_request
        self._max_candidates = max_candidates
        self._max_beginnings = max_beginnings
        # Last span of a prompt's beginning -> replicas that got such a prompt, the latest last.
        self._known: OrderedDict[TokenSpan, dict[int, None]] = OrderedDict()

    def choose(self, request: SimulatedRequest, view: RouterView, now_s: float) -> int:  # noqa: ARG002
        """Return the replica with the lowest cost: tokens for each unfinished request, minus reused tokens."""
        best, best_cost = -1, 0.0
        for idx in self._candidates(request.prompt, view.loads.least()):
            cost = view.loads.counts[idx] * self._tokens_per_request - view.hit_tokens(idx)
            if best < 0 or cost < best_cost:
                best, best_cost = idx, cost
        self._remember((*request.prompt, request.output), best)
        return best

    def _candidates(self, prompt: Sequence[TokenSpan], least: int) -> list[int]:
        """Return the least loaded replica, and replicas that got the longest beginnings of the prompt, latest first."""
        candidates = {least: None}
        for span in reversed(prompt):
            replicas = self._known.get(span)
            if replicas is not None:
                self._known.move_to_end(span)
                for idx in islice(reversed(replicas), self._max_candidates):
                    candidates[idx] = None
            if len(candidates) > self._max_candidates:
                break
        return list(candidates)[: self._max_candidates + 1]

    def _remember(self, spans: Sequence[TokenSpan], idx: int) -> None:
        for span in spans:
            replicas = self._known.setdefault(span, {})
            replicas.pop(idx, None)
            replicas[idx] = None
            if len(replicas) > self._max_candidates:
                del replicas[next(iter(replicas))]
        while len(self._known) > self._max_beginnings:
            self._known.popitem(last=False)
