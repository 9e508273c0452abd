"""Drafts with asynchronous scheduling: steps that run while outputs are made give the tokens of step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams, StructuredOutputs
from quire.engine.control import draft_costs
from quire.engine.control.draft_costs import BASELINE_INTERVAL
from quire.scheduling import async_scheduling
from quire.scheduling.async_scheduling import DRAFT_INTERVAL
from quire.scheduling.plan import StepPlan
from quire.scheduling.scheduler import Scheduler
from quire.sequences.decoding import speculation
from quire.sequences.decoding.drafting import UNKNOWN, ModelDrafter
from quire.sequences.decoding.speculation import AdaptiveDrafter
from quire.sequences.sequence import Sequence
from tests.engine.test_async_scheduling import (
    MIXED,
    STORY,
    AheadEngine,
    ahead_scheduler,
    assert_undisturbed,
    fail_draws,
    placeholder_scheduler,
    run_ahead,
    serve,
    served_step_by_step,
)
from tests.scheduling.harness import VOCAB_SIZE, Guesser, Job, Setting
from tests.scheduling.random_jobs import jobs, narrow_settings


@settings(max_examples=6)
@given(
    arriving=st.lists(jobs, min_size=1, max_size=7),
    setting=narrow_settings(),
    drafts=st.sampled_from(["guesser", "model"]),
)
def test_tokens_with_drafts_are_those_of_step_by_step(arriving: list[Job], setting: Setting, drafts: str) -> None:
    """Requests come and go while a step with their drafts is in flight; with drafts none is planned ahead."""
    arriving = [replace(job, prompt_logprobs=None, media=()) for job in arriving]
    world = run_ahead(arriving, replace(setting, drafts=drafts))
    assert_undisturbed(world, arriving)
    assert world.executor.num_ahead == 0
    assert world.executor.most_unread == 1


@pytest.mark.slow
@settings(max_examples=300)
@given(
    arriving=st.lists(jobs, min_size=1, max_size=9),
    setting=narrow_settings(),
    drafts=st.sampled_from(["guesser", "model"]),
)
def test_tokens_with_drafts_are_those_of_step_by_step_in_many_runs(
    arriving: list[Job], setting: Setting, drafts: str
) -> None:
    test_tokens_with_drafts_are_those_of_step_by_step.hypothesis.inner_test(  # type: ignore[attr-defined]
        arriving, setting, drafts
    )


# ---- drafts that rest ----


# Settings of `Setting.drafts` in which drafts rest.
resting_drafts = st.sampled_from(["adaptive", "resting"])


@contextmanager
def short_rests() -> Iterator[None]:
    """Let drafts rest for a few tokens, and measure steps without them often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation, "FIRST_PAUSE", 2)
        patch.setattr(speculation, "LONGEST_PAUSE", 5)
        patch.setattr(async_scheduling, "DRAFT_INTERVAL", 3)
        patch.setattr(draft_costs, "BASELINE_INTERVAL", 6)
        yield


@settings(max_examples=6)
@given(
    arriving=st.lists(jobs, min_size=1, max_size=7),
    setting=narrow_settings(),
    drafts=resting_drafts,
)
def test_tokens_are_those_of_step_by_step_where_drafts_rest(arriving: list[Job], setting: Setting, drafts: str) -> None:
    """Plans with drafts and plans made ahead take turns; and those in columns are those with placeholders."""
    arriving = [replace(job, prompt_logprobs=None, media=()) for job in arriving]
    setting = replace(setting, drafts=drafts)
    with short_rests():
        short, whole = (run_ahead(arriving, setting, each) for each in (ahead_scheduler, placeholder_scheduler))
    assert_undisturbed(short, arriving)
    assert short.executor.launched == whole.executor.launched
    assert not any(plan_has_drafts(plan) and UNKNOWN in plan_tokens(plan) for plan in short.executor.launched)


@pytest.mark.slow
@settings(max_examples=300)
@given(
    arriving=st.lists(jobs, min_size=1, max_size=9),
    setting=narrow_settings(),
    drafts=resting_drafts,
)
def test_tokens_are_those_of_step_by_step_where_drafts_rest_in_many_runs(
    arriving: list[Job], setting: Setting, drafts: str
) -> None:
    test_tokens_are_those_of_step_by_step_where_drafts_rest.hypothesis.inner_test(  # type: ignore[attr-defined]
        arriving, setting, drafts
    )


def plan_has_drafts(plan: StepPlan) -> bool:
    return any(item.num_draft for item in plan.items)


def plan_tokens(plan: StepPlan) -> set[int]:
    return {token_id for item in plan.items for token_id in item.token_ids}


class WrongGuesser(Guesser):
    """Guesses a token that is not drawn, where the tokens that it is asked for are known."""

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:  # noqa: ARG002
        assert min(sequence.tokens) >= 0, "a placeholder says nothing of what comes next"
        known = self.executor.predict_next(sequence.seq_id, sequence.tokens[sequence.num_computed :])
        return ((0 if known is None else known + 1) % VOCAB_SIZE,)


def run_with_wrong_drafts(num_jobs: int, *, is_ahead: bool = True, max_tokens: int = 60) -> AheadEngine:
    """Serve jobs, of which one comes after the other, whose drafts are never right, and cost what is believed first."""
    world = AheadEngine(Setting(), partial(Scheduler, plans_ahead=is_ahead))
    drafter = AdaptiveDrafter(WrongGuesser(world.executor, leaves_them=False), 4)
    world.scheduler.drafts.drafter = drafter
    for seed in range(num_jobs):
        world.add(Job(prompt=(1, seed), max_tokens=max_tokens, ignore_eos=True), seed)
        for _ in range(5):
            world.step()
    while world.engine.has_unfinished:
        world.step()
    return world


def drafted_at(world: AheadEngine) -> list[int]:
    """Return the numbers of tokens that a sequence had where it had drafts."""
    return [item.start + 1 for plan in world.executor.launched for item in plan.items if item.num_draft]


def test_steps_without_drafts_are_planned_ahead_and_rests_end() -> None:
    """All but the first steps of a rest, and drafts come where they come step by step."""
    expected, world = (run_with_wrong_drafts(1, is_ahead=is_ahead, max_tokens=400) for is_ahead in (False, True))
    assert world.outputs == expected.outputs
    assert drafted_at(world) == drafted_at(expected)
    rests = [after - before - 1 for before, after in pairwise(drafted_at(world))]
    assert rests[-4:] == [16, 32, 64, 128]
    # The step before a draft, and the draft, are read before the next one is planned.
    with_drafts = {plan.tick for plan in world.executor.launched if plan_has_drafts(plan)}
    read_first = {0} | with_drafts | {tick + 1 for tick in with_drafts}
    assert expected.executor.num_ahead == 0
    assert world.executor.num_ahead == len(world.executor.launched) - len(read_first)
    assert world.executor.num_in_columns > 300


def test_rests_that_are_over_end_together() -> None:
    """One sequence that tries a draft stops all; so those which it does not pay for try theirs in the same step."""
    expected, world = (run_with_wrong_drafts(6, is_ahead=is_ahead, max_tokens=400) for is_ahead in (False, True))
    assert world.outputs == expected.outputs
    all_came = 5 * 6
    steps, steps_by_step = (
        [plan.tick for plan in each.executor.launched[all_came:] if plan_has_drafts(plan)] for each in (world, expected)
    )
    assert all(after - before >= DRAFT_INTERVAL for before, after in pairwise(steps))
    assert len(steps) < len(steps_by_step) / 2
    assert 0 <= len(drafted_at(expected)) - len(drafted_at(world)) <= 6
    assert world.executor.num_ahead > 0.9 * sum(len(plan.items) for plan in world.executor.launched)


def test_a_step_is_measured_by_itself() -> None:
    """Overlapped steps say nothing of costs; every so often one runs alone, and then others run ahead again."""
    world = AheadEngine(Setting(drafts="adaptive"))
    measured = list[float | None]()
    costs = world.engine.step_recorder._draft_costs
    assert costs is not None
    record_step = costs.record_step

    def seen(num_seqs: int, num_drafts: int, elapsed_s: float | None) -> None:
        measured.append(elapsed_s)
        record_step(num_seqs, num_drafts, elapsed_s)

    costs.record_step = seen  # type: ignore[method-assign]
    params = given_params(speculative=False, max_tokens=400)
    world.engine.add_request("0", {"prompt_token_ids": [1, 2, 3]}, params)
    while world.engine.has_unfinished:
        world.engine.step()
    alone = [place for place, elapsed_s in enumerate(measured) if elapsed_s is not None]
    assert {measured[place] for place in alone} == {1.0}
    assert len(alone) == 1 + 400 // (BASELINE_INTERVAL + 2)
    assert world.executor.num_ahead > 380


def test_a_draft_model_reads_each_token_so_nothing_runs_ahead_of_it() -> None:
    world = AheadEngine(Setting())
    world.scheduler.drafts.drafter = AdaptiveDrafter(ModelDrafter(), 4)
    world.engine.add_request("0", {"prompt_token_ids": [1, 2, 3]}, given_params(speculative=False))
    while world.engine.has_unfinished:
        world.engine.step()
    assert (world.executor.num_ahead, world.executor.most_unread) == (0, 1)


def given_params(**options: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 30, "ignore_eos": True, "detokenize": False, "seed": 1} | options))


# Parameters, whether there are drafts, and whether the next step runs while outputs are made, from which token on.
LAUNCHED_BEHIND: list[tuple[dict[str, Any], bool, int | None]] = [
    ({}, True, 0),
    ({"logprobs": 2, "temperature": 0.7}, True, 0),
    ({"presence_penalty": 1.0}, True, None),  # counts drafts one after the other
    ({"min_tokens": 4, "stop_token_ids": (2,)}, True, 4),
    ({"n": 2}, True, 1),
    ({"logit_bias": {3: 1.0}}, True, None),
    ({"logit_bias": {3: 1.0}}, False, None),
    ({"prompt_logprobs": 1}, True, None),
    ({"beam_width": 2, "temperature": 0.0}, True, None),
]


@pytest.mark.parametrize(("options", "has_drafts", "first"), LAUNCHED_BEHIND, ids=str)
def test_the_next_step_runs_while_outputs_are_made_unless_it_needs_the_host(
    options: dict[str, Any], has_drafts: bool, first: int | None
) -> None:
    world = AheadEngine(Setting(drafts="guesser" if has_drafts else ""))
    world.engine.add_request("0", {"prompt_token_ids": [1, 2, 3]}, given_params(**options))
    launched_behind = dict[int, bool]()
    while True:
        world.engine.step()
        if not world.engine.has_unfinished:
            break
        num_tokens = min(len(each.tokens) - 3 for each in world.scheduler.sequences.values())
        launched_behind[num_tokens] = world.engine._in_flight is not None
    assert launched_behind == {count: first is not None and count >= first for count in launched_behind}
    assert len(launched_behind) > 3


# ---- the real data plane ----

DRAFTS: list[dict[str, Any]] = [
    {"speculative_method": "ngram", "prompt_lookup_min": 1},
    {"speculative_method": "suffix"},
    {"speculative_method": "draft", "draft_model": "bundled"},
]


@pytest.mark.parametrize("drafts", DRAFTS, ids=lambda drafts: drafts["speculative_method"])
def test_all_kinds_of_rows_beside_drafts(drafts: dict[str, Any]) -> None:
    """To the bit, in a pool that preempts and swaps, where steps with drafts run while outputs are made."""
    expected = served_step_by_step()
    options = MIXED | {"num_kv_blocks": 24, "swap_space": 1 << 20, "num_speculative_tokens": 4}
    with closing(LLM("bundled", **options, **drafts, async_scheduling=True)) as llm:
        assert serve(llm, final_only=True) == expected
        assert llm.stats.num_preemptions > 0
        assert llm.stats.num_draft_tokens > llm.stats.num_accepted_tokens
        assert llm.stats.num_accepted_tokens > 0 or drafts["speculative_method"] == "ngram"  # few repetitions


@pytest.mark.parametrize("drafts", DRAFTS, ids=lambda drafts: drafts["speculative_method"])
def test_all_kinds_of_rows_where_drafts_rest(drafts: dict[str, Any]) -> None:
    """To the bit, where steps with drafts and plans made ahead take turns; with a draft model nothing runs ahead."""
    expected = served_step_by_step()
    options = MIXED | {"num_kv_blocks": 24, "swap_space": 1 << 20, "num_speculative_tokens": 4}
    with short_rests(), closing(LLM("bundled", **options, **drafts, async_scheduling=True)) as llm:
        llm.engine.step_recorder.speculation = None
        drafter = llm.engine.scheduler.drafter
        assert isinstance(drafter, AdaptiveDrafter)
        drafter.step_costs = [1.0 + 2.0 * count for count in range(5)]
        executor: Any = llm.engine.executor
        launch, num_ahead = executor.launch, 0

        def seen(plan: StepPlan) -> Any:
            nonlocal num_ahead
            is_ahead = any(item.token_ids[0] == UNKNOWN for item in plan.items)
            assert not (is_ahead and plan_has_drafts(plan))
            num_ahead += is_ahead
            return launch(plan)

        executor.launch = seen
        assert serve(llm, final_only=True) == expected
        assert llm.stats.num_preemptions > 0
        assert llm.stats.num_draft_tokens > 0
        assert num_ahead > 10 if drafts["speculative_method"] != "draft" else num_ahead == 0


def test_a_grammar_beside_few_others_is_in_each_step() -> None:
    """The next step is launched with all of them once the present one is read."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    params = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True) for _ in range(3)]
    params.append(
        SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=StructuredOutputs(regex="[a-z ]{60}"))
    )
    with closing(LLM("bundled", num_threads=1, max_model_len=128, async_scheduling=True)) as llm:
        plans = list[StepPlan]()
        executor: Any = llm.engine.executor
        launch = executor.launch

        def seen(plan: StepPlan) -> Any:
            plans.append(plan)
            return launch(plan)

        executor.launch = seen
        outputs = llm.generate(["Tom", "Anna", "The old sailor", "A cow"], params, use_tqdm=False)
        assert llm.engine.has_unfinished is False
    assert [len(output.outputs[0].token_ids) for output in outputs[:3]] == [40] * 3
    assert len(outputs[3].outputs[0].text) == 60
    sizes = [len(plan.items) for plan in plans]
    assert sizes == sorted(sizes, reverse=True), "it left a step and came back"


def test_drafts_that_cannot_be_drawn_end_their_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of all fail together, and then each item's by themselves: the others go on with their drafts."""
    params = [SamplingParams(temperature=0.0, seed=seed, max_tokens=48, ignore_eos=True) for seed in (12, 13, 14)]
    options: dict[str, Any] = {"num_threads": 1, "max_model_len": 128, "num_speculative_tokens": 4}
    options |= {"speculative_method": "draft", "draft_model": "bundled", "async_scheduling": True}
    with closing(LLM("bundled", **options)) as llm:
        expected = llm.generate([STORY] * 3, params, use_tqdm=False)
        failed = fail_draws(monkeypatch)
        good, bad, other = llm.generate([STORY] * 3, params, use_tqdm=False)
        assert "could not be sampled" in (bad.error or "")
        assert [each.outputs[0].token_ids for each in (good, other)] == [
            each.outputs[0].token_ids for each in (expected[0], expected[2])
        ]
        assert max(failed) > min(failed) > 1, "there were drafts"
        assert min(each.outputs[0].num_accepted_tokens for each in (good, other)) > 0
        assert llm.usage().used == 0
