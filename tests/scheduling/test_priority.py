"""The policy "priority": order of admission, preemption of lower priorities, and no starvation."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from quire.memory import FullAttention, RecurrentState
from quire.scheduling.policies import FLOW_STRIDE, MAX_FLOW_DELAY, Order
from quire.sequences import Request, SamplingParams, SequenceStatus
from tests.scheduling.harness import Harness, Job, Setting, finish_all, prompt

# Room for two prompts of 20 tokens, and a few tokens more.
SMALL = Setting(num_blocks=13, budget=32, max_num_seqs=4, policy="priority", caching=False)
LONG = Job(prompt=prompt(20), max_tokens=20, ignore_eos=True, priority=1)
URGENT = replace(LONG, priority=0)


def started(*jobs: Job, setting: Setting = SMALL) -> Harness:
    """Return a harness that has computed the prompts of some jobs."""
    harness = Harness(setting)
    for job in jobs:
        harness.add(job, seed=len(harness.requests))
    while any(sequence.num_pending > 1 for request in harness.requests for sequence in request.sequences):
        harness.step()
    return harness


def is_running(request: Request) -> bool:
    return all(sequence.status is SequenceStatus.RUNNING for sequence in request.sequences)


# ---- a higher priority takes what lower ones have ----


def test_a_higher_priority_preempts_a_running_lower_one_at_once() -> None:
    harness = started(LONG, LONG)
    urgent = harness.add(URGENT, seed=2)
    harness.step()
    older, younger, _ = harness.requests
    assert is_running(urgent)
    assert (older.num_preemptions, younger.num_preemptions) == (0, 1), "the last in order gives its memory"
    finish_all(harness)
    assert [len(request.sequences[0].output_token_ids) for request in harness.requests] == [20, 20, 20]


def test_a_higher_priority_takes_a_slot_where_memory_is_plenty() -> None:
    harness = started(LONG, LONG, setting=replace(SMALL, num_blocks=200, max_num_seqs=2))
    urgent = harness.add(replace(URGENT, n=2), seed=2)
    harness.step()
    assert is_running(urgent)
    assert [request.num_preemptions for request in harness.requests] == [1, 1, 0]
    finish_all(harness)


def test_who_loses_memory_is_swapped_where_there_is_a_host_tier() -> None:
    harness = started(LONG, LONG, setting=replace(SMALL, host_blocks=40, preemption_mode="swap"))
    urgent = harness.add(URGENT, seed=2)
    harness.step()
    assert is_running(urgent)
    assert [sequence.request.seed for sequence in harness.scheduler.swapped] == [1]
    finish_all(harness)


@pytest.mark.parametrize("change", [{"priority": 1}, {"priority": 2}])
def test_equal_and_lower_priorities_wait(change: dict[str, Any]) -> None:
    harness = started(LONG, LONG)
    harness.add(replace(LONG, **change), seed=2)
    harness.step()
    assert harness.scheduler.stats.num_preemptions == 0
    assert len(harness.scheduler.waiting) == 1


def test_nobody_loses_memory_where_that_would_not_be_enough() -> None:
    """Six of 13 blocks are held by an equal and two by a lower priority: nine are not to be had."""
    harness = started(URGENT, replace(LONG, prompt=prompt(4)))
    harness.add(replace(URGENT, prompt=prompt(36), max_tokens=10), seed=2)
    harness.step()
    assert harness.scheduler.stats.num_preemptions == 0
    finish_all(harness)


def test_fcfs_has_no_priorities() -> None:
    harness = started(LONG, LONG, setting=replace(SMALL, policy="fcfs"))
    harness.add(URGENT, seed=2)
    harness.step()
    assert harness.scheduler.stats.num_preemptions == 0
    finish_all(harness)


@pytest.mark.parametrize(
    ("host_blocks", "has_states"),
    [(0, True), (30, False), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((0, False), (30, True)))],
)
def test_whoever_takes_memory_tokens_stay_the_same(host_blocks: int, has_states: bool) -> None:
    """Random priorities with samples and beams; each output as when it runs alone."""
    specs = (FullAttention(block_size=4), RecurrentState(block_size=4, layer_bytes=600)) if has_states else ()
    mode = "swap" if host_blocks else "recompute"
    num_bytes = 9600 if has_states else 36 * 16
    setting = replace(
        SMALL, specs=specs, num_bytes=num_bytes, caching=True, host_blocks=host_blocks, preemption_mode=mode
    )
    rng, harness = random.Random(5), Harness(setting)
    jobs = [
        Job(
            prompt=prompt(rng.randrange(2, 24)),
            max_tokens=rng.randrange(2, 16),
            n=rng.choice((1, 1, 2)),
            ignore_eos=True,
            priority=rng.randrange(4),
        )
        for _ in range(40)
    ]
    for seed, job in enumerate(jobs):
        harness.add(job, seed)
        for _ in range(rng.randrange(4)):
            harness.step()
    finish_all(harness)
    assert harness.scheduler.stats.num_preemptions > 5
    for seed, (job, request) in enumerate(zip(jobs, harness.requests, strict=True)):
        alone = Harness(Setting())
        expected = alone.add(job, seed)
        finish_all(alone)
        tokens = [sequence.output_token_ids for sequence in request.sequences]
        assert tokens == [sequence.output_token_ids for sequence in expected.sequences]


def test_prefills_leave_budget_for_the_preempting_request() -> None:
    """Of two, the older is preempted (its last block is not full), and the chunk of the younger would fill the step."""
    setting = replace(SMALL, num_blocks=200, budget=8, max_num_seqs=2, preemption_policy="least_waste")
    harness = started(replace(LONG, prompt=prompt(21)), setting=setting)
    harness.add(replace(LONG, prompt=prompt(60)), seed=1)
    while harness.requests[1].sequences[0].num_computed < 28:
        harness.step()
    urgent = harness.add(URGENT, seed=2)
    plan = harness.step()
    assert [request.num_preemptions for request in harness.requests] == [1, 0, 0]
    assert is_running(urgent)
    assert [len(item.token_ids) for item in plan.items] == [7, 1]
    finish_all(harness)


def test_drafts_leave_to_a_higher_priority_what_was_freed_for_it() -> None:
    """Drafts of the sequences that go on would fill the step for which a search, the first of all, lost its memory."""
    setting = Setting(num_blocks=41, block_size=1, budget=7, max_num_seqs=6, watermark=0, caching=False)
    harness = Harness(replace(setting, policy="priority", preemption_policy="least_waste", drafts="guesser"))
    low = replace(LONG, prompt=(0,) * 11, ignore_eos=False)
    harness.add(replace(low, max_tokens=5, beam_width=3), seed=1)
    harness.add(replace(low, prompt=(0,) * 12, max_tokens=4, n=3), seed=2)
    for _ in range(5):
        harness.step()
    urgent = harness.add(Job(prompt=(0,), max_tokens=2, beam_width=2), seed=3)
    harness.step()
    assert [request.num_preemptions for request in harness.requests] == [3, 0, 0]
    assert is_running(urgent)
    finish_all(harness)


# ---- nothing waits for ever ----


@pytest.mark.parametrize(("aging", "levels"), [(1, 1), (4, 1), (4, 3), (16, 2)])
def test_a_lower_priority_is_overtaken_a_bounded_number_of_times(aging: int, levels: int) -> None:
    harness = Harness(Setting(budget=8, max_num_seqs=1, policy="priority", priority_aging=aging))
    low = harness.add(Job(prompt=prompt(3), max_tokens=2, ignore_eos=True, priority=levels), seed=0)
    for seed in count(1):
        harness.add(Job(prompt=prompt(3), max_tokens=2, ignore_eos=True), seed)
        harness.step()
        if low.is_finished or seed > 10 * aging * levels:
            break
    overtaking = [request for request in harness.requests[1:] if request.order_key < low.order_key]
    assert len(overtaking) == aging * levels - 1, "one that comes as many requests later is level, and behind"
    assert all(request.is_finished for request in overtaking)
    assert low.is_finished, "it waits for ever"


def test_without_ageing_to_the_end_the_same_stream_would_starve_it() -> None:
    harness = Harness(Setting(budget=8, max_num_seqs=1, policy="priority", priority_aging=10_000))
    low = harness.add(Job(prompt=prompt(3), max_tokens=2, ignore_eos=True, priority=1), seed=0)
    for seed in range(1, 80):
        harness.add(Job(prompt=prompt(3), max_tokens=2, ignore_eos=True), seed)
        harness.step()
    assert not low.is_finished
    finish_all(harness)
    assert low.is_finished


def test_one_that_was_overtaken_often_enough_is_not_preempted_again() -> None:
    harness = started(LONG, setting=replace(SMALL, num_blocks=11, priority_aging=3))
    low = harness.requests[0]
    for seed in range(1, 30):
        harness.add(replace(URGENT, max_tokens=3), seed)
        harness.step()
        if low.is_finished:
            break
    assert low.num_preemptions <= 2
    finish_all(harness)


# ---- flows take turns ----


def request_of(arrival: int, flow: str | None, n: int = 1, priority: int = 0) -> Request:
    return Request(
        request_id=str(arrival),
        prompt_token_ids=[1],
        params=SamplingParams(n=n, max_tokens=2),
        max_total_tokens=3,
        end_token_ids=frozenset(),
        arrival=arrival,
        seed=0,
        priority=priority,
        flow=flow,
    )


def test_requests_of_one_flow_come_apart_and_others_in_between() -> None:
    order = Order("fcfs", 256)
    body = [order.key_of(request_of(arrival, "body")) for arrival in range(100)]
    single = order.key_of(request_of(100, None))
    assert [turn for turn, _ in body] == [FLOW_STRIDE * idx for idx in range(100)]
    assert sum(place < single for place in body) == 100 // FLOW_STRIDE + 1
    assert body == sorted(body)


def test_samples_count_as_requests_of_a_flow() -> None:
    order = Order("fcfs", 256)
    assert [order.key_of(request_of(idx, "body", n=4))[0] for idx in range(3)] == [0, 64, 128]


def test_no_flow_is_delayed_for_ever() -> None:
    order = Order("fcfs", 256)
    turns = [order.key_of(request_of(idx, "tenant", n=8))[0] for idx in range(5000)]
    assert max(turn - idx for idx, turn in enumerate(turns)) == MAX_FLOW_DELAY
    assert turns == sorted(turns)


def test_flows_whose_turn_has_come_are_forgotten() -> None:
    order = Order("fcfs", 256)
    for arrival in range(3 * MAX_FLOW_DELAY):
        order.key_of(request_of(arrival, f"body {arrival // 2}", n=1 + arrival % 5))
    assert len(order._next_turns) <= MAX_FLOW_DELAY


def test_a_small_request_does_not_wait_for_all_of_a_large_flow() -> None:
    harness = Harness(Setting(budget=16, max_num_seqs=4))
    for seed in range(64):
        harness.add(Job(prompt=prompt(6), max_tokens=4, ignore_eos=True, flow="body"), seed)
    single = harness.add(Job(prompt=prompt(6), max_tokens=4, ignore_eos=True), seed=64)
    while not single.is_finished:
        harness.step()
    assert sum(request.is_finished for request in harness.requests) <= 1 + 64 // FLOW_STRIDE + 4
    finish_all(harness)


def test_an_earlier_place_alone_takes_no_memory() -> None:
    harness = started(*[replace(LONG, flow="body")] * 2)
    single = harness.add(LONG, seed=2)
    assert single.order_key < harness.requests[1].order_key
    harness.step()
    assert harness.scheduler.stats.num_preemptions == 0
    finish_all(harness)
