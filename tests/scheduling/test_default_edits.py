"""The fast path for plain sampled tokens, against the slow twin that asks the strategy for each token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from quire.memory.usage import Usage
from quire.scheduling import Scheduler, registry
from quire.scheduling.edits import SequenceEvent
from quire.scheduling.plan import ItemResult, ScheduledSequence, StepPlan
from quire.sequences.strategy import Append
from tests.scheduling.harness import Outcome, Setting, run
from tests.scheduling.random_jobs import random_jobs

SETTINGS = {
    "plenty": Setting(),
    "little": Setting(num_blocks=19, budget=16, max_num_seqs=8, watermark=1),
    "a host": Setting(num_blocks=19, budget=16, max_num_seqs=8, preemption_mode="swap", host_blocks=60),
    "drafts": Setting(num_blocks=40, budget=16, max_num_seqs=8, drafts="guesser"),
}
# Of an item: the sequence, what happened, the tokens that it had then.
Told = tuple[int, int, Any, int]


def watched(patch: pytest.MonkeyPatch, setting: Setting, seed: int) -> tuple[Outcome, list[StepPlan], list[Told]]:
    """Run jobs, and note all that was planned, and all that came of it."""
    plans: list[StepPlan] = []
    told: list[Told] = []
    honest_plan, honest_update = Scheduler.plan, Scheduler.update_from_results

    def plan(scheduler: Scheduler, tick: int) -> StepPlan:
        plans.append(honest_plan(scheduler, tick))
        return plans[-1]

    def update_from_results(
        scheduler: Scheduler, items: Sequence[ScheduledSequence], results: Sequence[ItemResult]
    ) -> list[SequenceEvent]:
        events = honest_update(scheduler, items, results)
        told.extend((idx, sequence.seq_id, edit, num_tokens) for idx, sequence, edit, num_tokens in events)
        return events

    with patch.context() as inner:
        inner.setattr(Scheduler, "plan", plan)
        inner.setattr(Scheduler, "update_from_results", update_from_results)
        return run(random_jobs(random.Random(seed), 25), setting), plans, told


def usage_of(outcome: Outcome) -> Usage:
    return outcome.scheduler.memory.usage()


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_token_comes_to_what_its_strategy_says(setting: Setting, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, plans, told = watched(monkeypatch, setting, seed)
    num_usual = sum(isinstance(edit, Append) and edit.draw_idx == 0 for _, _, edit, _ in told)
    assert num_usual > 200
    monkeypatch.setattr(registry, "default_edit_of", lambda *_: None)
    slow, slow_plans, slow_told = watched(monkeypatch, setting, seed)
    assert told == slow_told
    assert [plan._replace(items=()) for plan in plans] == [plan._replace(items=()) for plan in slow_plans]
    # Openings have the parameters of requests that were made twice.
    for plan, slow_plan in zip(plans, slow_plans, strict=True):
        assert [item._replace(new_sequence=None) for item in plan.items] == [
            item._replace(new_sequence=None) for item in slow_plan.items
        ]
    assert outcome.outputs == slow.outputs
    assert usage_of(outcome) == usage_of(slow)
    for request, slow_request in zip(outcome.requests, slow.requests, strict=True):
        ends = [(sequence.finish_reason, sequence.stop_reason) for sequence in request.sequences]
        assert ends == [(sequence.finish_reason, sequence.stop_reason) for sequence in slow_request.sequences]
