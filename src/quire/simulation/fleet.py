"""A fleet of simulated replicas: events in the order of their times, from arrivals to the last token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from quire.errors import ConfigError
from quire.simulation.replica import EngineReplica, ReplicaSettings
from quire.simulation.request import SimulatedRequest
from quire.simulation.routing import ReplicaLoads, SimulatedRouter
from quire.simulation.samples import SimulationSamples
from quire.simulation.step_time import StepTimeModel
from quire.simulation.tokens import TokenTable

# Returns the request that follows one which ended at a moment, such as the next turn of its conversation.
FollowUp = Callable[[SimulatedRequest, float], SimulatedRequest | None]

# At one moment requests arrive before steps end, as an engine takes new requests before it plans the next step.
_ARRIVAL, _STEP_END = 0, 1


class FleetTotals(NamedTuple):
    """Sums over the replicas of a run.

    Args:
        num_replicas: number of replicas.
        num_used: number of those that got a request.
        num_steps: number of steps.
        busy_s: seconds in steps.
        num_preemptions: number of times that a running sequence lost its memory.
        num_evictions: number of evicted blocks.
        duration_s: seconds from the start to the end of the last request.
    """

    num_replicas: int
    num_used: int
    num_steps: int
    busy_s: float
    num_preemptions: int
    num_evictions: int
    duration_s: float


class SimulatedFleet:
    """Replicas behind a router.

    Args:
        settings: options of each replica.
        step_time: model of the seconds of a step.
        router: policy that chooses a replica for each request.
        num_replicas: number of replicas, at least 1; each is made when it gets its first request.
        follow_up: function that returns the request after one that has ended; None where requests come by themselves.
        can_leap: False to take every step by itself.

    Attributes:
        samples: measurements.
        table: maker of token ids.
        loads: numbers of unfinished requests.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        step_time: StepTimeModel,
        router: SimulatedRouter,
        num_replicas: int = 1,
        *,
        follow_up: FollowUp | None = None,
        can_leap: bool = True,
    ) -> None:
        self.samples = SimulationSamples()
        self._settings = settings
        self._step_time = step_time
        self._router = router
        self._follow_up = follow_up
        self._can_leap = can_leap
        self.table = TokenTable()
        self._replicas: list[EngineReplica | None] = [None] * num_replicas
        self.loads = ReplicaLoads(num_replicas)
        self._events: list[tuple[float, int, int, int, SimulatedRequest | None]] = []
        self._num_follow_ups = 0
        self._now_s = 0.0

    def run(self, requests: Iterable[SimulatedRequest]) -> FleetTotals:
        """Serve requests to the end of the last one.

        Args:
            requests: requests in the order of their arrivals.

        Raises:
            ConfigError: a request arrives before the one before it.
        """
        coming = iter(requests)
        request = next(coming, None)
        events, replicas = self._events, self._replicas
        while request is not None or events:
            if request is not None and (not events or request.arrival_s <= events[0][0]):
                if request.arrival_s < self._now_s:
                    raise ConfigError(
                        f"arrival_s must not fall, got {request.arrival_s} after {self._now_s}", field="arrival_s"
                    )
                self._arrive(request)
                request = next(coming, None)
                continue
            self._now_s, kind, idx, version, follow_up = heappop(events)
            if kind == _ARRIVAL:
                assert follow_up is not None, "an arrival has a request"
                self._arrive(follow_up)
                continue
            replica = replicas[idx]
            if replica is not None and replica.version == version:
                started, ended = replica.end_step()
                for each in started:
                    self._router.on_first_token(each, idx, self._now_s)
                for each in ended:
                    self._router.on_end(each, idx, self._now_s)
                    self._continue(each)
                self.loads.set(idx, replica.num_unfinished)
                self._expect(idx, replica)
        return self._totals()

    def _arrive(self, request: SimulatedRequest) -> None:
        now_s = self._now_s = request.arrival_s
        idx = self._router.choose(request, _FleetView(self, request), now_s)
        replica = self._replicas[idx]
        if replica is None:
            replica = self._replicas[idx] = EngineReplica(
                self._settings, self._step_time, self.samples, self.table, can_leap=self._can_leap
            )
            self._router.on_replica(idx, replica.memory)
        version = replica.version
        is_queued = replica.submit(request, now_s)
        self.loads.set(idx, replica.num_unfinished)
        if replica.version != version:
            self._expect(idx, replica)
        if not is_queued:
            self._router.on_end(request, idx, now_s)
            self._continue(request)

    def hit_tokens(self, idx: int, request: SimulatedRequest) -> int:
        """Return the tokens of a request's prompt that a replica would reuse."""
        replica = self._replicas[idx]
        if replica is None:
            return 0
        version = replica.version
        found = replica.hit_tokens(request, self._now_s)
        if replica.version != version:
            self._expect(idx, replica)
        return found

    def _continue(self, ended: SimulatedRequest) -> None:
        """Have the request arrive that follows one which has ended."""
        following = None if self._follow_up is None else self._follow_up(ended, self._now_s)
        if following is not None:
            self._num_follow_ups += 1
            heappush(self._events, (following.arrival_s, _ARRIVAL, self._num_follow_ups, 0, following))

    def _expect(self, idx: int, replica: EngineReplica) -> None:
        """Note when the step in progress of a replica ends."""
        if replica.end_s is not None:
            heappush(self._events, (replica.end_s, _STEP_END, idx, replica.version, None))

    def _totals(self) -> FleetTotals:
        used = [replica for replica in self._replicas if replica is not None]
        return FleetTotals(
            num_replicas=len(self._replicas),
            num_used=len(used),
            num_steps=sum(replica.num_steps for replica in used),
            busy_s=sum(replica.busy_s for replica in used),
            num_preemptions=sum(replica.scheduler.stats.num_preemptions for replica in used),
            num_evictions=sum(pool.num_evictions for replica in used for pool in replica.memory.arena.pools),
            duration_s=max(self.samples.ended_s, default=0.0),
        )


class _FleetView:
    """The fleet as a router sees it when a request arrives."""

    __slots__ = ("_fleet", "_request")

    def __init__(self, fleet: SimulatedFleet, request: SimulatedRequest) -> None:
        self._fleet = fleet
        self._request = request

    @property
    def loads(self) -> ReplicaLoads:
        return self._fleet.loads

    def hit_tokens(self, idx: int) -> int:
        return self._fleet.hit_tokens(idx, self._request)

    def token_ids(self) -> list[int]:
        return self._fleet.table.token_ids(self._request.prompt)
