"""A fleet of simulated replicas: a loop over events in the order of their times, from arrivals to the last token.

Requests go through *stages*: one, whose replicas compute prompts and decode; or two, where replicas of the first
compute prompts and hand their blocks over to replicas of the second. Each stage has a separate router.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import NamedTuple

from quire.errors import ConfigError
from quire.measurement.simulation.hand_over import (
    HandedRequest,
    Links,
    PrefillSplit,
    exported_blocks,
    lacking_bytes,
    receive_blocks,
    split_settings,
)
from quire.measurement.simulation.replicas.replica import EngineReplica
from quire.measurement.simulation.replicas.replica_settings import ReplicaSettings
from quire.measurement.simulation.replicas.step_time import StepTimeModel
from quire.measurement.simulation.replicas.tokens import TokenTable
from quire.measurement.simulation.request import SimulatedRequest
from quire.measurement.simulation.routing import ReplicaLoads, SimulatedRouter
from quire.measurement.simulation.samples import SimulationSamples

# Returns the request that follows a request that ended at some time, such as the next turn of its conversation.
FollowUp = Callable[[SimulatedRequest, float], SimulatedRequest | None]

# At equal times, requests arrive before steps end, since an engine takes new requests before it plans the next step.
_ARRIVAL, _STEP_END = 0, 1


class FleetTotals(NamedTuple):
    """Sums over the replicas of a run.

    Args:
        num_replicas: number of replicas.
        num_used: number of replicas that got a request.
        num_steps: number of steps.
        busy_s: seconds in steps.
        num_preemptions: number of times that a running sequence lost its memory.
        num_evictions: number of evicted blocks.
        duration_s: seconds from the start to the end of the last request.
        num_handed_bytes: number of bytes that replicas handed over.
    """

    num_replicas: int
    num_used: int
    num_steps: int
    busy_s: float
    num_preemptions: int
    num_evictions: int
    duration_s: float
    num_handed_bytes: int = 0


class _Stage:
    """Replicas with consecutive numbers and their router."""

    __slots__ = ("first", "loads", "num_coming", "router", "samples")

    def __init__(self, first: int, count: int, router: SimulatedRouter, samples: SimulationSamples) -> None:
        self.first = first
        self.router = router
        self.samples = samples
        self.loads = ReplicaLoads(count)
        # Replica -> number of requests on their way to it.
        self.num_coming: Counter[int] = Counter()

    def set_load(self, number: int, replica: EngineReplica) -> None:
        """Update the number of unfinished requests of a replica, including requests on their way to it."""
        idx = number - self.first
        self.loads.set(idx, replica.num_unfinished + self.num_coming[idx])


class SimulatedFleet:
    """Replicas and their routers, and the loop over events."""

    def __init__(
        self,
        settings: ReplicaSettings,
        step_time: StepTimeModel,
        router: SimulatedRouter,
        num_replicas: int = 1,
        *,
        follow_up: FollowUp | None = None,
        can_leap: bool = True,
        split: PrefillSplit | None = None,
        decode_router: SimulatedRouter | None = None,
    ) -> None:
        self.samples = SimulationSamples()
        self._settings = settings if split is None else split_settings(settings)
        self._step_time = step_time
        self._follow_up = follow_up
        self._can_leap = can_leap
        self.table = TokenTable()
        self._replicas: list[EngineReplica | None] = [None] * num_replicas
        num_first = num_replicas
        if split is not None:
            num_first = split.num_prefill
            if num_first >= num_replicas:
                raise ConfigError(
                    f"prefill_replicas must be less than replicas ({num_replicas}), got {num_first}",
                    field="prefill_replicas",
                )
        self._links = None if split is None else Links(split)
        first_samples = self.samples if split is None else SimulationSamples()
        self._stages = [_Stage(0, num_first, router, first_samples)]
        if split is not None:
            assert decode_router is not None, "a split has two routers"
            self._stages.append(_Stage(num_first, num_replicas - num_first, decode_router, self.samples))
        # Time, kind, number of the arrival or the replica, version of the replica, request that arrives.
        self._events: list[tuple[float, int, int, int, SimulatedRequest | HandedRequest | None]] = []
        self._num_arrivals = 0
        self._now_s = 0.0

    def run(self, requests: Iterable[SimulatedRequest]) -> FleetTotals:
        """Serve requests to the end of the last one."""
        with no_cycle_collection():
            self._run(iter(requests))
        return self._totals()

    def _run(self, coming: Iterator[SimulatedRequest]) -> None:
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
            self._now_s, kind, idx, version, arriving = heappop(events)
            if kind == _ARRIVAL:
                if isinstance(arriving, HandedRequest):
                    self._receive(arriving)
                else:
                    assert arriving is not None, "an arrival has a request"
                    self._arrive(arriving)
                continue
            replica = replicas[idx]
            if replica is not None and replica.version == version:
                self._end_step(idx, replica)

    def hit_tokens(self, number: int, request: SimulatedRequest) -> int:
        """Return the number of tokens of a request's prompt that a replica would reuse."""
        replica = self._replicas[number]
        if replica is None:
            return 0
        version = replica.version
        num_hit = replica.hit_tokens(request, self._now_s)
        if replica.version != version:
            self._expect(number, replica)
        return num_hit

    # ---- events ----

    def _arrive(self, request: SimulatedRequest) -> None:
        """Give a request to a replica of the first stage."""
        self._now_s = request.arrival_s
        stage = self._stages[0]
        number = stage.first + stage.router.choose(request, _FleetView(self, stage, request), self._now_s)
        # If another replica decodes, this one computes only the prompt, whose last step yields one token.
        self._submit(stage, number, request, None if self._links is None else 1, None)

    def _end_step(self, number: int, replica: EngineReplica) -> None:
        """End a step of a replica, continue or hand over its ended requests, and begin the next step."""
        stage = self._stage_of(number)
        idx = number - stage.first
        num_before = len(stage.samples)
        started, ended = replica.take_results()
        if stage.router.follows_events:
            stage.router.on_step_results(idx, self._now_s)
        for request in started:
            stage.router.on_first_token(request, idx, self._now_s)
        for request, num_cached in zip(ended, stage.samples.num_cached[num_before:] if ended else (), strict=True):
            stage.router.on_end(request, idx, self._now_s)
            if stage is self._stages[-1]:
                self._continue(request)
            else:
                self._hand_over(request, replica, num_cached)
        replica.begin_next()
        stage.set_load(number, replica)
        self._expect(number, replica)

    def _hand_over(self, request: SimulatedRequest, source: EngineReplica, num_cached: int) -> None:
        """Send the blocks of a prompt to the replica that continues it."""
        stage = self._stages[-1]
        idx = stage.router.choose(request, _FleetView(self, stage, request), self._now_s)
        number = stage.first + idx
        replica = self._replica(stage, number)
        blocks = exported_blocks(source, request, self.table)
        version = replica.version
        num_bytes = lacking_bytes(replica, request, self.table, blocks, self._now_s)
        if replica.version != version:
            self._expect(number, replica)
        assert self._links is not None
        stage.num_coming[idx] += 1
        stage.set_load(number, replica)
        ready_s = self._links.send(number, num_bytes, self._now_s)
        self._num_arrivals += 1
        handed = HandedRequest(request, number, blocks, num_cached)
        heappush(self._events, (ready_s, _ARRIVAL, self._num_arrivals, 0, handed))

    def _receive(self, handed: HandedRequest) -> None:
        """Submit a request to the replica that continues it, and publish the blocks that have arrived there."""
        stage, number = self._stages[-1], handed.replica
        replica = self._replica(stage, number)
        version = replica.version
        receive_blocks(replica, handed, self.table, self._now_s)
        if replica.version != version:
            self._expect(number, replica)
        stage.num_coming[number - stage.first] -= 1
        self._submit(stage, number, handed.request, None, handed.num_cached)

    # ---- parts ----

    def _submit(
        self, stage: _Stage, number: int, request: SimulatedRequest, num_new: int | None, num_cached: int | None
    ) -> None:
        replica = self._replica(stage, number)
        version = replica.version
        is_queued = replica.submit(request, self._now_s, num_new, num_cached)
        stage.set_load(number, replica)
        if replica.version != version:
            self._expect(number, replica)
        if not is_queued:
            stage.router.on_end(request, number - stage.first, self._now_s)
            self._continue(request)

    def _stage_of(self, number: int) -> _Stage:
        """Return the stage of a replica."""
        return self._stages[-1] if number >= self._stages[-1].first else self._stages[0]

    def _replica(self, stage: _Stage, number: int) -> EngineReplica:
        """Return a replica; the first request creates it."""
        replica = self._replicas[number]
        if replica is None:
            replica = self._replicas[number] = EngineReplica(
                self._settings, self._step_time, stage.samples, self.table, can_leap=self._can_leap
            )
            replica.is_followed = stage.router.follows_events
            stage.router.on_replica(number - stage.first, replica.memory)
        return replica

    def _continue(self, ended: SimulatedRequest) -> None:
        """Schedule the arrival of the request that follows an ended one, if any."""
        following = None if self._follow_up is None else self._follow_up(ended, self._now_s)
        if following is not None:
            self._num_arrivals += 1
            heappush(self._events, (following.arrival_s, _ARRIVAL, self._num_arrivals, 0, following))

    def _expect(self, number: int, replica: EngineReplica) -> None:
        """Schedule the end of the step in progress of a replica."""
        if replica.end_s is not None:
            heappush(self._events, (replica.end_s, _STEP_END, number, replica.version, None))

    def _totals(self) -> FleetTotals:
        used = [replica for replica in self._replicas if replica is not None]
        if len(self._stages) > 1:
            self.samples.num_rejected += self._stages[0].samples.num_rejected
        return FleetTotals(
            num_replicas=len(self._replicas),
            num_used=len(used),
            num_steps=sum(replica.num_steps for replica in used),
            busy_s=sum(replica.busy_s for replica in used),
            num_preemptions=sum(replica.scheduler.stats.num_preemptions for replica in used),
            num_evictions=sum(pool.num_evictions for replica in used for pool in replica.memory.arena.pools),
            duration_s=max(self.samples.ended_s, default=0.0),
            num_handed_bytes=0 if self._links is None else self._links.num_bytes,
        )


class _FleetView:
    """The router's view of a stage when a request arrives."""

    __slots__ = ("_fleet", "_request", "_stage")

    def __init__(self, fleet: SimulatedFleet, stage: _Stage, request: SimulatedRequest) -> None:
        self._fleet = fleet
        self._stage = stage
        self._request = request

    @property
    def loads(self) -> ReplicaLoads:
        return self._stage.loads

    def hit_tokens(self, idx: int) -> int:
        return self._fleet.hit_tokens(self._stage.first + idx, self._request)

    def token_ids(self) -> list[int]:
        return self._fleet.table.token_ids(self._request.prompt)


@contextmanager
def no_cycle_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector in a block.

    A simulation leaves no cycles of objects behind, since ended requests are taken apart. But the number of its objects
    grows to millions, and the collector would visit all of them again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
