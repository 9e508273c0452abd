"""The split of prefill and decoding: what is sent, when it arrives, and what the two replicas compute."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.measurement.simulation.fleet import FleetTotals, SimulatedFleet
from quire.measurement.simulation.hand_over import PrefillSplit
from quire.measurement.simulation.replicas.replica_settings import ReplicaSettings
from quire.measurement.simulation.replicas.step_time import StepItem
from quire.measurement.simulation.request import SimulatedRequest
from quire.measurement.simulation.routers import ROUTERS
from quire.measurement.simulation.samples import SimulationSamples
from quire.memory.invariants import check
from quire.memory.specs import FullAttention, SlidingWindow
from tests.simulation.fleets import BLOCK_SIZE, one_request, random_requests, settings, step_time

BLOCK_BYTES = FullAttention(block_size=BLOCK_SIZE).bytes_per_block
HOST_BYTES = 200 * BLOCK_BYTES


def split_settings(num_blocks: int = 400, host_bytes: int = HOST_BYTES, **options: Any) -> ReplicaSettings:
    return settings(num_blocks, memory={"host_bytes": host_bytes}, **options)


def simulate(
    requests: list[SimulatedRequest],
    options: ReplicaSettings | None = None,
    *,
    split: PrefillSplit | None = None,
    router: str = "round_robin",
    num_replicas: int = 2,
    can_leap: bool = True,
) -> tuple[SimulationSamples, FleetTotals]:
    fleet = SimulatedFleet(
        options or split_settings(),
        step_time(),
        ROUTERS[router](),
        num_replicas,
        can_leap=can_leap,
        split=split or PrefillSplit(num_prefill=1),
        decode_router=ROUTERS[router](),
    )
    totals = fleet.run(requests)
    for replica in fleet._replicas:
        if replica is not None:
            assert replica.num_unfinished == 0
            check(replica.memory)
    return fleet.samples, totals


def test_a_request_alone_takes_its_steps_the_link_and_the_copies() -> None:
    model, options = step_time(), split_settings()
    split = PrefillSplit(num_prefill=1, bytes_per_s=1e4, latency_s=0.5)
    samples, totals = simulate([one_request(100, 4)], options, split=split)
    prefill_s = model.of_step([StepItem(0, 100, 1)])
    arrival_s = prefill_s + 6 * BLOCK_BYTES / 1e4 + 0.5
    # The last four tokens of the prompt fill no block.
    first_s = model.of_step([StepItem(96, 4, 1)]) + 6 * BLOCK_BYTES / options.copy_bytes_per_s
    decodes = [model.of_step([StepItem(100 + idx, 1, 1)]) for idx in range(3)]
    ends = list(accumulate((first_s, *decodes), initial=arrival_s))[1:]
    assert list(samples.arrivals_s) == [0.0]
    assert list(samples.first_s) == pytest.approx([ends[0]], rel=1e-12)
    assert list(samples.ended_s) == pytest.approx([ends[-1]], rel=1e-12)
    assert (list(samples.num_new), list(samples.num_cached)) == ([4], [0])
    assert (totals.num_handed_bytes, totals.num_steps, totals.num_used) == (6 * BLOCK_BYTES, 5, 2)


def test_blocks_that_a_replica_has_are_not_sent_again() -> None:
    again = one_request(100, 4, 50.0)._replace(output_stream=9)
    samples, totals = simulate([one_request(100, 4), again])
    assert totals.num_handed_bytes == 6 * BLOCK_BYTES
    # What the first replica has in its cache counts, not what it sends.
    assert list(samples.num_cached) == [0, 99]


def test_a_link_takes_one_hand_over_after_the_other() -> None:
    split = PrefillSplit(num_prefill=1, bytes_per_s=6.0 * BLOCK_BYTES, latency_s=0.0)
    samples, _ = simulate([one_request(100, 1, stream=2 * idx + 1) for idx in range(3)], split=split)
    firsts = sorted(samples.first_s)
    # The prompts take steps of some milliseconds, the blocks of each a second.
    assert [later - before for before, later in pairwise(firsts)] == pytest.approx([1.0, 1.0], abs=0.1)
    assert firsts[0] == pytest.approx(1.0, abs=0.2)


def test_what_the_host_tier_has_no_room_for_is_computed_again() -> None:
    whole, _ = simulate([one_request(100, 4)])
    short, totals = simulate([one_request(100, 4)], split_settings(host_bytes=4 * BLOCK_BYTES))
    assert 0 < totals.num_handed_bytes <= 3 * BLOCK_BYTES
    assert short.first_s[0] > whole.first_s[0]


def test_a_request_that_never_fits_is_rejected_once() -> None:
    samples, _ = simulate([one_request(16 * 400, 1), one_request(20, 5, stream=3)])
    assert (samples.num_rejected, len(samples)) == (1, 1)


LOADS: dict[str, dict[str, Any]] = {
    "room for all": {"num_blocks": 2000},
    "preemption": {"num_blocks": 60},
    "a small host tier": {"num_blocks": 100, "host_bytes": 12 * BLOCK_BYTES},
    "two groups": {
        "num_blocks": 150,
        "specs": (FullAttention(block_size=16), SlidingWindow(block_size=16, window=64)),
    },
}


@pytest.mark.parametrize(
    ("name", "router"),
    [
        *((name, "least_loaded") for name in LOADS),
        ("preemption", "kv_events"),
        *(pytest.param("preemption", name, marks=pytest.mark.slow) for name in ROUTERS if name != "kv_events"),
    ],
)
def test_leaps_give_what_steps_give(name: str, router: str) -> None:
    requests = list(random_requests(50, 15.0, seed=len(name), shared=100))
    split = PrefillSplit(num_prefill=2, bytes_per_s=1e5, latency_s=0.002)
    runs = [
        simulate(requests, split_settings(**LOADS[name]), split=split, router=router, num_replicas=5, can_leap=can_leap)
        for can_leap in (True, False)
    ]
    (leaping, leapt), (stepping, stepped) = runs
    assert len(leaping) + leaping.num_rejected == 50
    assert len(leaping) > 40
    assert leapt.num_handed_bytes > 0
    assert leaping.snapshot() == stepping.snapshot()
    assert leapt == stepped


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"num_prefill": 0}, "prefill_replicas"),
        ({"num_prefill": True}, "prefill_replicas"),
        ({"num_prefill": 2}, "prefill_replicas"),
        ({"num_prefill": 1, "bytes_per_s": 0.0}, "transfer_bytes_per_s"),
        ({"num_prefill": 1, "latency_s": -1.0}, "transfer_latency_s"),
        ({"num_prefill": 1, "latency_s": float("nan")}, "transfer_latency_s"),
    ],
)
def test_a_wrong_split_is_refused(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        simulate([one_request(10, 1)], split=PrefillSplit(**values))
    assert caught.value.field == field


def test_a_split_needs_a_prefix_cache() -> None:
    options = settings(100, memory={"enable_prefix_caching": False})
    with pytest.raises(ConfigError) as caught:
        simulate([one_request(10, 1)], options)
    assert caught.value.field == "prefill_replicas"
