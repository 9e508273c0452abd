"""Drafts with asynchronous scheduling: steps that run while outputs are made give the tokens of step by step."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams, StructuredOutputs
from quire.scheduling.plan import StepPlan
from tests.engine.test_async_scheduling import (
    MIXED,
    STORY,
    AheadEngine,
    assert_undisturbed,
    fail_draws,
    run_ahead,
    serve,
    served_step_by_step,
)
from tests.scheduling.harness import Job, Setting
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
