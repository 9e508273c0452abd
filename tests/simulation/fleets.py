"""Small fleets for tests: step times, random requests, and runs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from quire.measurement.simulation.fleet import FleetTotals, SimulatedFleet
from quire.measurement.simulation.replicas.replica_settings import ReplicaSettings
from quire.measurement.simulation.replicas.step_time import FEATURES, FittedStepTime
from quire.measurement.simulation.replicas.tokens import TokenSpan
from quire.measurement.simulation.request import SimulatedRequest
from quire.measurement.simulation.routers import ROUTERS
from quire.measurement.simulation.samples import SimulationSamples
from quire.memory.recording.settings import MemorySettings
from quire.memory.specs import FullAttention, KVCacheSpec

BLOCK_SIZE = 16


def step_time(**coefficients: float) -> FittedStepTime:
    """Return a model with the given coefficients, or with one that depends on everything."""
    given = coefficients or {"step": 0.01, "rows_to_16": 3e-4, "rows_above": 2e-4, "read_tokens": 1e-7, "pairs": 1e-8}
    return FittedStepTime(dict.fromkeys(FEATURES, 0.0) | given)


def settings(
    num_blocks: int = 400, specs: Sequence[KVCacheSpec] = (), memory: dict[str, Any] | None = None, **options: Any
) -> ReplicaSettings:
    """Return the options of a replica with a small memory."""
    more = {"watermark": num_blocks // 100} | (memory or {})
    chosen = tuple(specs) or (FullAttention(block_size=BLOCK_SIZE),)
    return ReplicaSettings(
        memory=MemorySettings(specs=chosen, num_blocks=num_blocks, **more),
        **{"max_num_seqs": 32, "max_num_batched_tokens": 256, **options},
    )


def random_requests(
    count: int, rate: float, seed: int = 0, *, prompt: int = 200, new: int = 100, shared: int = 0, priorities: int = 1
) -> Iterator[SimulatedRequest]:
    """Yield requests of exponential lengths in a Poisson process; every second one has a beginning in common."""
    rng, now_s = random.Random(seed), 0.0
    for idx in range(count):
        now_s += rng.expovariate(rate)
        own = TokenSpan(2 * idx + 1, 0, 1 + int(rng.expovariate(1 / prompt)))
        spans = (TokenSpan(0, 0, shared), own) if shared and rng.random() < 0.5 else (own,)
        num_new = 1 + int(rng.expovariate(1 / new))
        yield SimulatedRequest(now_s, spans, num_new, 2 * idx + 2, priority=rng.randrange(priorities))


def one_request(num_prompt: int, num_new: int, arrival_s: float = 0.0, stream: int = 1) -> SimulatedRequest:
    """Return a request with a prompt of its own."""
    return SimulatedRequest(arrival_s, (TokenSpan(stream, 0, num_prompt),), num_new, stream + 1)


def simulate(
    requests: Iterator[SimulatedRequest] | Sequence[SimulatedRequest],
    options: ReplicaSettings | None = None,
    *,
    router: str = "round_robin",
    num_replicas: int = 1,
    model: FittedStepTime | None = None,
    can_leap: bool = True,
) -> tuple[SimulationSamples, FleetTotals]:
    """Run a fleet to the end of all requests."""
    fleet = SimulatedFleet(
        options or settings(), model or step_time(), ROUTERS[router](), num_replicas, can_leap=can_leap
    )
    totals = fleet.run(requests)
    return fleet.samples, totals
