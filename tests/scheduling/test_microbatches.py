"""Microbatches: the same tokens as step by step, disjoint requests in flight, even shares, and equal ranks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.memory.results import BlockCopy, MemoryOps, StoredBlock, Tier
from quire.scheduling import StepPlan
from quire.scheduling.command_log import CommandLog, CommandReplay, CommandStream
from quire.scheduling.scheduler import Scheduler
from quire.sequences import Request
from tests.scheduling.harness import NEVER, Guesser, Harness, Job, Setting, outputs_of
from tests.scheduling.random_jobs import agrees, jobs, narrow_settings, undisturbed


class PipelinedHarness(Harness):
    """A harness that plans ahead, and checks what is in flight.

    Args:
        setting: see `Harness`.
        num_microbatches: plans that may be in flight.
    """

    def __init__(self, setting: Setting, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches
        self.in_flight: list[StepPlan] = []
        self.most_in_flight = 0
        super().__init__(setting)

    def __post_init__(self) -> None:
        super().__post_init__()
        setting, drafter = self.setting, self.scheduler.drafter
        self.microbatches = Scheduler(
            self.memory,
            num_microbatches=self.num_microbatches,
            drafter=drafter,
            **setting.scheduler_options,
        )
        self.microbatches.chunk_tokens = setting.chunk_tokens
        self.scheduler = self.microbatches
        self.auditor.scheduler = self.microbatches

    def plan(self) -> StepPlan:
        """Have the pipeline filled, and check what is in flight; return the oldest plan."""
        scheduler = self.microbatches
        plan = scheduler.plan(self.tick)
        self.in_flight += scheduler.microbatches.new_plans
        assert len(self.in_flight) <= self.num_microbatches
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        planned = [item.seq_id for each in self.in_flight for item in each.items]
        assert len(set(planned)) == len(planned), "a sequence is in two plans in flight"
        for each in self.in_flight:
            assert each.items
            assert sum(len(item.token_ids) for item in each.items) <= scheduler.max_num_batched_tokens
        if self.in_flight:
            assert self.in_flight.pop(0)._replace(tick=plan.tick) == plan
        else:
            assert not plan.items
            assert not scheduler.has_unfinished, "S3: nothing is in flight, though there is work"
        self.audit()
        return plan


def run_pipelined(arriving: list[Job], setting: Setting, num_microbatches: int) -> PipelinedHarness:
    """Run jobs with their arrivals and aborts until nothing is in flight; afterwards nothing is held."""
    harness = PipelinedHarness(setting, num_microbatches)
    added: dict[int, Request] = {}
    last = max(job.arrives_at for job in arriving)
    most_steps = 200 + 80 * sum(len(job.prompt) + (job.beam_width or job.n) * job.max_tokens for job in arriving)
    while harness.tick <= last or harness.scheduler.has_unfinished or harness.in_flight:
        assert harness.tick < most_steps, "the run does not end"
        for idx, job in enumerate(arriving):
            if job.arrives_at == harness.tick:
                added[idx] = harness.add(job, seed=idx)
        aborted = [added[idx] for idx, job in enumerate(arriving) if job.abort_at == harness.tick and idx in added]
        late = [request for request in aborted if arriving[request.seed].abort_while_running]
        for request in aborted:
            if request not in late:
                harness.abort(request)
        plan = harness.plan()
        for request in late:
            harness.abort(request)
        harness.finish_step(plan)
    usage = harness.memory.usage()
    assert usage.used == 0
    assert usage.host is None or usage.host.used == 0
    assert not harness.scheduler.requests
    harness.requests = [added[idx] for idx in range(len(arriving))]
    return harness


@settings(max_examples=8)
@given(arriving=st.lists(jobs, min_size=1, max_size=7), setting=narrow_settings(), count=st.integers(1, 4))
def test_tokens_are_those_of_step_by_step(arriving: list[Job], setting: Setting, count: int) -> None:
    harness = run_pipelined(arriving, setting, count)
    for job, request, expected in zip(arriving, harness.requests, undisturbed(arriving), strict=True):
        assert agrees(job, outputs_of(request), expected)


@pytest.mark.slow
@settings(max_examples=300)
@given(arriving=st.lists(jobs, min_size=1, max_size=9), setting=narrow_settings(), count=st.integers(2, 4))
def test_tokens_are_those_of_step_by_step_in_many_runs(arriving: list[Job], setting: Setting, count: int) -> None:
    test_tokens_are_those_of_step_by_step.hypothesis.inner_test(arriving, setting, count)  # type: ignore[attr-defined]


@settings(max_examples=8)
@given(arriving=st.lists(jobs, min_size=1, max_size=7), setting=narrow_settings())
def test_one_microbatch_is_planned_as_a_step(arriving: list[Job], setting: Setting) -> None:
    """The twin: a scheduler that plans the next step when the results of the last one are there."""
    arriving = [replace(job, abort_at=NEVER) for job in arriving]
    setting = replace(setting, drafts="")
    plain, pipelined = Harness(setting, is_audited=False), PipelinedHarness(setting, 1)
    last = max(job.arrives_at for job in arriving)
    while plain.tick <= last or plain.scheduler.has_unfinished:
        for idx, job in enumerate(arriving):
            if job.arrives_at == plain.tick:
                plain.add(job, seed=idx)
                pipelined.add(job, seed=idx)
        plan = plain.plan()
        assert pipelined.plan() == plan
        plain.finish_step(plan)
        pipelined.finish_step(plan)


def test_requests_that_run_are_divided_evenly_and_all_stages_have_work() -> None:
    harness = PipelinedHarness(Setting(), 3)
    for idx in range(9):
        harness.add(Job(prompt=(1, idx), max_tokens=40, ignore_eos=True), seed=idx)
    sizes = [len(harness.step().items) for _ in range(30)]
    assert sizes == [3] * 30
    assert harness.most_in_flight == 3
    # One ends: the others are divided anew.
    harness.abort(harness.requests[0])
    sizes = [len(harness.step().items) for _ in range(30)]
    assert max(sizes[3:]) == 3
    assert sum(sizes[3:30:3]) + sum(sizes[4:30:3]) + sum(sizes[5:30:3]) == 8 * 9


def test_samples_of_a_request_stay_together() -> None:
    harness = PipelinedHarness(Setting(), 2)
    for idx in range(2):
        harness.add(Job(prompt=(1, idx), max_tokens=12, n=3, ignore_eos=True), seed=idx)
    for _ in range(4):
        harness.step()
    for _ in range(6):
        requests = {harness.scheduler.sequences[item.seq_id].request for item in harness.plan().items}
        assert len(requests) == 1


def test_the_first_in_order_goes_on_where_others_hold_all_memory() -> None:
    """Two sequences fill the pool; each in a plan of its own, neither could grow beside the other."""
    setting = Setting(num_blocks=4, block_size=2, budget=8, max_num_seqs=2, caching=False)
    arriving = [Job(prompt=(1, 0), max_tokens=6, ignore_eos=True), Job(prompt=(1, 1), max_tokens=6, ignore_eos=True)]
    harness = run_pipelined(arriving, setting, 2)
    assert [outputs_of(request) for request in harness.requests] == undisturbed(arriving)
    assert harness.scheduler.stats.num_preemptions > 0


@settings(max_examples=8)
@given(
    arriving=st.lists(jobs, min_size=1, max_size=7),
    setting=narrow_settings(),
    count=st.integers(2, 4),
    has_drafts=st.booleans(),
)
def test_ranks_repeat_plans_that_are_made_ahead(
    arriving: list[Job], setting: Setting, count: int, has_drafts: bool
) -> None:
    arriving = [replace(job, media=()) for job in arriving]
    setting = replace(setting, drafts="guesser" if has_drafts else "")
    leader, follower = PipelinedHarness(setting, count), PipelinedHarness(setting, count)
    if has_drafts:
        guesser: Any = leader.scheduler.drafter
        assert isinstance(guesser, Guesser)
        follower.scheduler.drafts.drafter = guesser
    beside = PipelinedHarness(setting, count)
    if has_drafts:
        beside.scheduler.drafts.drafter = guesser
    replay, made = CommandReplay(follower.scheduler), list[StepPlan]()
    # A rank that executes plans together with rank 0.
    replay_beside, executed = CommandReplay(beside.scheduler, runs_ahead=False), list[StepPlan]()

    def send(commands: bytes) -> None:
        made.extend(replay.apply(commands))
        executed.extend(replay_beside.apply(commands))

    stream = CommandStream(send)
    CommandLog(leader.microbatches, stream, 1)
    added: dict[int, Request] = {}
    rng = random.Random(0)
    last = max(job.arrives_at for job in arriving)
    while leader.tick <= last or leader.scheduler.has_unfinished or leader.in_flight:
        for idx, job in enumerate(arriving):
            if job.arrives_at == leader.tick:
                added[idx] = leader.add(job, seed=idx)
            if job.abort_at == leader.tick and idx in added:
                leader.abort(added[idx])
        leader.scheduler.chunk_tokens = rng.choice([None, 1, 4])
        made.clear()
        executed.clear()
        plan = leader.scheduler.plan(leader.tick)
        assert made == leader.microbatches.microbatches.new_plans
        assert executed == ([plan] if plan.items else [])
        leader.in_flight += leader.microbatches.microbatches.new_plans
        leader.in_flight = leader.in_flight[1:]
        leader.finish_step(plan)
        stream.flush()
        first, second = leader.microbatches, follower.microbatches
        assert [each.seq_id for each in first.running] == [each.seq_id for each in second.running]
        assert first.memory.usage() == second.memory.usage()
    assert not follower.scheduler.has_unfinished


def test_copies_of_plans_in_flight_come_before_those_not_planned_yet() -> None:
    """Copies to disk name their blocks by a number, which is that among the blocks of all."""
    scheduler = PipelinedHarness(Setting(), 3).microbatches
    blocks = [StoredBlock(0, bytes([idx]), b"", b"") for idx in range(3)]

    def ops(*idxs: int) -> MemoryOps:
        to_disk = [BlockCopy(0, idx, number, Tier.DEVICE, Tier.DISK) for number, idx in enumerate(idxs)]
        return MemoryOps((BlockCopy(0, 7, 8, Tier.DEVICE, Tier.HOST), *to_disk), tuple(blocks[idx] for idx in idxs))

    scheduler.microbatches._in_flight.extend(
        StepPlan(tick, (), each, ()) for tick, each in enumerate((ops(2), ops(0, 1)))
    )
    taken = scheduler.take_ops()
    assert [taken.saves[copy.dst_id] for copy in taken.copies if copy.dst_tier is Tier.DISK] == [
        blocks[idx] for idx in (2, 0, 1)
    ]
    assert [copy.dst_id for copy in taken.copies if copy.dst_tier is Tier.HOST] == [8, 8]
    assert scheduler.take_ops() == MemoryOps()
