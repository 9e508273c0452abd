"""A simulated replica: its times are those of its steps, and leaps change nothing but the work of simulating."""

from __future__ import annotations

import gc
from itertools import accumulate
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.measurement.simulation.replicas.replica import EngineReplica
from quire.measurement.simulation.replicas.step_time import StepItem
from quire.measurement.simulation.replicas.tokens import TokenTable
from quire.measurement.simulation.routers import ROUTERS
from quire.measurement.simulation.samples import SimulationSamples
from quire.memory.invariants import check
from quire.memory.specs import FullAttention, SlidingWindow
from tests.simulation.fleets import one_request, random_requests, settings, simulate, step_time


def test_a_request_alone_takes_the_seconds_of_its_steps() -> None:
    model = step_time()
    samples, totals = simulate([one_request(600, 4)], settings(max_num_batched_tokens=256), model=model)
    chunks = [StepItem(0, 256, 0), StepItem(256, 256, 0), StepItem(512, 88, 1)]
    decodes = [StepItem(599 + idx, 1, 1) for idx in range(1, 4)]
    ends = list(accumulate(model.of_step([part]) for part in (*chunks, *decodes)))
    assert list(samples.first_s) == [ends[2]]
    assert list(samples.ended_s) == [ends[-1]]
    assert totals.num_steps == 6
    assert totals.busy_s == pytest.approx(ends[-1])


def test_a_request_that_comes_during_a_step_waits_for_its_end() -> None:
    model = step_time(step=1.0)
    first, second = one_request(10, 5, 0.0), one_request(10, 1, 2.5, stream=3)
    samples, _ = simulate([first, second], model=model)
    assert sorted(zip(samples.arrivals_s, samples.first_s, samples.ended_s, strict=True)) == [
        (0.0, 1.0, 5.0),
        (2.5, 4.0, 4.0),
    ]


def test_a_request_that_comes_as_a_step_ends_is_in_the_next_one() -> None:
    samples, _ = simulate([one_request(10, 5), one_request(10, 1, 2.0, stream=3)], model=step_time(step=1.0))
    assert sorted(samples.first_s) == [1.0, 3.0]


def test_the_second_of_two_equal_prompts_hits_the_blocks_of_the_first() -> None:
    first, second = one_request(100, 2), one_request(100, 2, 50.0)
    samples, _ = simulate([first, second])
    assert list(samples.num_cached) == [0, 99]


def test_a_request_that_never_fits_is_rejected_and_costs_the_others_nothing() -> None:
    small = [one_request(20, 5, stream=3)]
    samples, _ = simulate([one_request(16 * 400, 1), *small])
    alone, _ = simulate(small)
    assert samples.num_rejected == 1
    assert list(samples.ended_s) == list(alone.ended_s)


LOADS: dict[str, dict[str, Any]] = {
    "room for all": {"num_blocks": 2000},
    "preemption": {"num_blocks": 60},
    "few seats": {"num_blocks": 400, "max_num_seqs": 4},
    "small steps": {"num_blocks": 400, "max_num_batched_tokens": 32},
    "least waste": {"num_blocks": 60, "preemption_policy": "least_waste"},
    "priorities": {"num_blocks": 60, "policy": "priority"},
    "fifo": {"num_blocks": 150, "memory": {"eviction": "fifo"}},
    "lfu": {"num_blocks": 150, "memory": {"eviction": "lfu"}},
    "slru": {"num_blocks": 150, "memory": {"eviction": "slru"}},
    "swap": {"num_blocks": 60, "preemption_mode": "swap", "memory": {"host_bytes": 200 * 64}},
    "no cache": {"num_blocks": 150, "memory": {"enable_prefix_caching": False}},
    "blocks of one token": {"num_blocks": 2000, "specs": (FullAttention(block_size=1),)},
    "two groups": {
        "num_blocks": 150,
        "specs": (FullAttention(block_size=16), SlidingWindow(block_size=16, window=64)),
    },
}


@pytest.mark.parametrize("rate", [pytest.param(3.0, marks=pytest.mark.slow), 12.0])
@pytest.mark.parametrize("name", LOADS)
def test_leaps_give_what_steps_give(name: str, rate: float) -> None:
    requests = list(random_requests(40, rate, seed=len(name), shared=100, priorities=3))
    leaping, leapt = simulate(requests, settings(**LOADS[name]))
    stepping, stepped = simulate(requests, settings(**LOADS[name]), can_leap=False)
    assert len(leaping) + leaping.num_rejected == 40
    assert len(leaping) > 35
    assert leaping.snapshot() == stepping.snapshot()
    assert leapt == stepped


@pytest.mark.parametrize("eviction", ["lru", "fifo", "lfu", "slru"])
def test_what_is_remembered_of_evicted_blocks_changes_no_result(eviction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = list(random_requests(60, 6.0, seed=3, shared=100))
    options = settings(80, memory={"eviction": eviction})
    forgetting, _ = simulate(requests, options)
    tree = EngineReplica(options, step_time(), SimulationSamples(), TokenTable()).memory.tree
    assert tree.max_tombstones == 0
    # The memory's own number cannot be changed any more.
    monkeypatch.setattr(type(tree), "max_tombstones", property(lambda _: 80, lambda *_: None))
    remembering, _ = simulate(requests, options)
    assert forgetting.snapshot() == remembering.snapshot()


@pytest.mark.parametrize("router", ROUTERS)
def test_leaps_give_what_steps_give_behind_every_router(router: str) -> None:
    requests = list(random_requests(80, 20.0, seed=5, shared=100))
    leaping, leapt = simulate(requests, settings(150), router=router, num_replicas=3)
    stepping, stepped = simulate(requests, settings(150), router=router, num_replicas=3, can_leap=False)
    assert leaping.snapshot() == stepping.snapshot()
    assert leapt == stepped


def test_a_leap_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    begin = EngineReplica._begin_step

    def begin_step(self: EngineReplica, now_s: float) -> None:
        plans.append(now_s)
        begin(self, now_s)

    monkeypatch.setattr(EngineReplica, "_begin_step", begin_step)
    _, totals = simulate([one_request(10, 100)])
    # The prompt's step; the leap behind it ends the request.
    assert len(plans) == 1
    assert totals.num_steps == 100


def test_the_memory_is_sound_within_a_leap() -> None:
    replica = EngineReplica(settings(200), step_time(), SimulationSamples(), TokenTable())
    for idx in range(6):
        replica.submit(one_request(40, 90 + idx, stream=2 * idx + 1), 0.0)
    while replica.end_s is not None:
        replica.settle((replica.end_s or 0.0) - 0.3)
        check(replica.memory)
        replica.end_step()
        check(replica.memory)
    assert replica.memory.usage().used == 0


def test_a_question_about_hits_changes_no_result() -> None:
    replica = EngineReplica(settings(200), step_time(), SimulationSamples(), TokenTable())
    twin = EngineReplica(settings(200), step_time(), SimulationSamples(), TokenTable())
    for each in (replica, twin):
        each.submit(one_request(40, 90), 0.0)
        each.end_step()
    assert replica.hit_tokens(one_request(40, 1), 0.5) == 39
    for each in (replica, twin):
        while each.end_s is not None:
            each.end_step()
    assert replica._samples.snapshot() == twin._samples.snapshot()


def test_a_step_tells_who_begins_to_answer_and_who_ends() -> None:
    replica = EngineReplica(settings(200), step_time(), SimulationSamples(), TokenTable())
    long, short = one_request(40, 3), one_request(40, 1, stream=5)
    replica.submit(long, 0.0)
    replica.submit(short, 0.0)
    told = []
    while replica.end_s is not None:
        told.append(replica.end_step())
    assert told == [([long], []), ([short], [short]), ([], [long])]


@pytest.mark.parametrize(
    ("coefficients", "field"),
    [
        ({"step": -1.0}, "step"),
        ({"step": float("nan")}, "step"),
        ({"pairs": 1.0}, "step"),
        ({"step": 1.0, "rows": 1.0}, "rows"),
        ({"step": "1"}, "step"),
    ],
)
def test_wrong_coefficients_are_refused(coefficients: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        step_time(**coefficients)
    assert caught.value.field == field


def test_cycles_are_collected_again_after_a_run_that_fails() -> None:
    with pytest.raises(ConfigError, match="arrival_s"):
        simulate([one_request(10, 1, 5.0), one_request(10, 1, 4.0, stream=3)])
    assert gc.isenabled()
