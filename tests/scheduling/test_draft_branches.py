"""Branches: when there are some, what they take, and that nothing is left of them."""

from __future__ import annotations

import pytest

from quire.scheduling import StepPlan
from quire.scheduling.plan import ItemResult
from quire.sequences.decoding.speculation import AdaptiveDrafter
from tests.scheduling.harness import Harness, Job, Setting, finish_all
from tests.scheduling.random_jobs import FULL, STATE


def jobs_of(count: int) -> list[Job]:
    return [Job(prompt=(idx, 1, 2, 1, 2, 1), max_tokens=30, ignore_eos=True) for idx in range(count)]


def plan_with_branches(harness: Harness) -> StepPlan:
    """Step until a plan has branches."""
    for _ in range(60):
        plan = harness.plan()
        if harness.scheduler.drafts.branches.seq_ids:
            return plan
        harness.finish_step(plan)
    raise AssertionError("there were no branches")


def harness_of(count: int, **options: object) -> Harness:
    harness = Harness(Setting(drafts="branches", **options))  # type: ignore[arg-type]
    for seed, job in enumerate(jobs_of(count)):
        harness.add(job, seed)
    return harness


def test_a_failed_step_leaves_no_branch() -> None:
    harness = harness_of(2)
    plan = plan_with_branches(harness)
    seq_ids = set(harness.scheduler.drafts.branches.seq_ids)
    assert seq_ids <= {item.seq_id for item in plan.items}
    for request in harness.requests:
        harness.scheduler.abort(request.request_id)
    harness.scheduler.recover(plan)
    harness.audit()
    assert not harness.scheduler.drafts.branches.seq_ids
    assert harness.memory.usage().used == 0
    harness.add(Job(prompt=(0,)), seed=9)
    assert seq_ids <= set(harness.plan().finished_ids)


def test_an_abort_in_flight_leaves_no_branch() -> None:
    """Its branches end with a sequence: blocks are free at once, and none of their tokens counts as verified."""
    harness = harness_of(2)
    plan = plan_with_branches(harness)
    stats = harness.scheduler.stats
    num_draft_tokens, num_drafts = stats.num_draft_tokens, stats.num_drafts
    num_drafted = [request.sequences[0].num_drafted for request in harness.requests]
    for request in harness.requests:
        harness.abort(request)
    assert not harness.scheduler.drafts.branches.seq_ids
    assert harness.memory.usage().used == 0
    harness.finish_step(plan)
    assert harness.memory.usage().used == 0
    assert (stats.num_draft_tokens, stats.num_drafts) == (num_draft_tokens, num_drafts)
    assert [request.sequences[0].num_drafted for request in harness.requests] == num_drafted
    harness.add(Job(prompt=(0,)), seed=9)
    assert {item.seq_id for item in plan.items} <= set(harness.plan().finished_ids)


def test_branches_of_an_item_that_failed_were_not_wrong() -> None:
    harness = harness_of(1)
    plan = plan_with_branches(harness)
    drafter = harness.scheduler.drafts.drafter
    assert isinstance(drafter, AdaptiveDrafter)
    before = [(rate.num_right, rate.num_wrong) for rate in drafter._branch_rates]
    failed = [ItemResult(item.seq_id, (), error="logits are not finite") for item in plan.items]
    harness.scheduler.update_from_results(plan.items, failed)
    assert not harness.scheduler.drafts.branches.seq_ids
    assert [(rate.num_right, rate.num_wrong) for rate in drafter._branch_rates] == before


@pytest.mark.parametrize(("max_num_seqs", "count", "most"), [(8, 2, 4), (3, 2, 1), (2, 2, 0), (4, 6, 0)])
def test_branches_take_free_places_of_sequences(max_num_seqs: int, count: int, most: int) -> None:
    """There are none while another sequence waits."""
    harness, seen = harness_of(count, max_num_seqs=max_num_seqs), 0
    while len(harness.scheduler.requests) == count:
        plan = harness.plan()
        seen = max(seen, len(harness.scheduler.drafts.branches.seq_ids))
        assert len(plan.items) <= max_num_seqs
        harness.finish_step(plan)
    assert seen == most
    finish_all(harness)


def test_branches_keep_to_the_token_budget_and_count_as_drafts() -> None:
    harness = harness_of(2, budget=9, max_num_seqs=8)
    seen = num_drafts = 0
    drafter = harness.scheduler.drafter
    assert isinstance(drafter, AdaptiveDrafter)
    # Costs with which branches are shorter than first drafts.
    drafter.step_costs = [1.0 + 0.05 * row for row in range(15)]
    while harness.scheduler.has_unfinished:
        plan = harness.plan()
        assert sum(len(item.token_ids) for item in plan.items) <= 9
        seen += len(harness.scheduler.drafts.branches.seq_ids)
        num_drafts += sum(item.num_draft for item in plan.items)
        harness.finish_step(plan)
    assert seen > 0
    assert harness.scheduler.stats.num_draft_tokens == num_drafts
    assert sum(request.sequences[0].num_drafted for request in harness.requests) == num_drafts


def test_a_branch_copies_a_block_and_a_state() -> None:
    harness = harness_of(1, specs=(*FULL, STATE))
    plan = plan_with_branches(harness)
    branches = harness.scheduler.drafts.branches.seq_ids
    (item, *others) = plan.items
    assert {other.seq_id for other in others} == branches
    tables = [harness.memory.block_table(seq_id) for seq_id in (item.seq_id, *branches)]
    num_shared = item.start // 4
    assert num_shared > 0
    assert len({table[:num_shared] for table in tables}) == 1
    assert len({table[num_shared] for table in tables}) == len(tables)
    states = [harness.memory.block_table(seq_id, 1)[-1] for seq_id in (item.seq_id, *branches)]
    assert len(set(states)) == len(states)
    harness.finish_step(plan)
    finish_all(harness)
