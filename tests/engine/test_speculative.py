"""Speculative decoding in the engine: the same outputs in fewer steps, and its counters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.exporters.prometheus import Metrics
from quire.engine.outputs.outputs import RequestOutput
from quire.errors import InvalidParameter, UnsupportedFeature
from quire.sequences.decoding.speculation import AdaptiveDrafter
from quire.sequences.decoding.strategies import SAMPLING
from tests.engine.test_metrics import samples

PROMPTS = [
    "Once upon a time, a small fox lived alone in a sunny garden.",
    "Tom found a red kite in the valley.",
    "The old sailor",
]
# Rows round alike in float32, whatever they are batched with, as far as a choice between two tokens goes.
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "device": "cpu", "num_kv_blocks": 400}


def load(method: str, **options: Any) -> LLM:
    """Load a model that believes in drafts, whatever this machine's clock says of their costs."""
    llm = LLM("bundled", speculative_method=method, **OPTIONS, **options)
    llm.engine.step_recorder.speculation = None
    speculation = llm.engine.scheduler.drafter
    assert isinstance(speculation, AdaptiveDrafter)
    speculation.step_costs = [1.0 + 0.02 * k for k in range(speculation.num_tokens + 1)]
    return llm


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("bundled", **OPTIONS)


@pytest.fixture(scope="module")
def drafting() -> LLM:
    llm = load("suffix")
    # Two runs teach it what will be said.
    for _ in range(2):
        llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=80), use_tqdm=False)
    return llm


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [
        [(each.text, each.token_ids, each.finish_reason, each.stop_reason) for each in output.outputs]
        for output in outputs
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop": ("happy",)},
        {"stop": ("happy", ". "), "include_stop_str_in_output": True, "min_tokens": 9},
        {"stop": (" s",), "min_tokens": 30},
        {"stop_token_ids": (46, 300, 301)},
        {"max_tokens": 3},
        {"max_tokens": 17, "ignore_eos": True},
        {"n": 3, "temperature": 0.7, "seed": 5},
        {"n": 2, "best_of": 4, "temperature": 0.7, "seed": 5},
        {"repetition_penalty": 1.05, "min_tokens": 20},
        {"bad_words": ("garden", "kite")},
        {"dry_multiplier": 0.2},
    ],
    ids=str,
)
def test_outputs_are_the_same_in_fewer_steps(plain: LLM, drafting: LLM, options: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 80, **options})
    steps: list[int] = []
    results: list[Any] = []
    for llm in (plain, drafting):
        before = llm.stats.num_steps
        results.append(told(llm.generate(PROMPTS, params, use_tqdm=False)))
        steps.append(llm.stats.num_steps - before)
    assert results[0] == results[1]
    # Of samples nobody knows what they will say.
    assert steps[1] < steps[0] or params.max_tokens == 3 or (params.temperature and steps[1] == steps[0])


def test_log_probabilities_come_for_every_token(plain: LLM, drafting: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, logprobs=2, prompt_logprobs=1)
    for expected, output in zip(
        *(llm.generate(PROMPTS, params, use_tqdm=False) for llm in (plain, drafting)), strict=True
    ):
        (first,), (second,) = expected.outputs, output.outputs
        assert second.num_accepted_tokens > 10
        assert first.logprobs is not None
        assert second.logprobs is not None
        assert len(second.logprobs) == len(second.token_ids)
        for one, other in zip(first.logprobs, second.logprobs, strict=True):
            assert list(one) == list(other)
            assert [each.logprob for each in one.values()] == pytest.approx(
                [e.logprob for e in other.values()], abs=1e-4
            )


def test_a_request_can_do_without(drafting: LLM) -> None:
    params = partial(SamplingParams, temperature=0.0, max_tokens=60)
    for speculative, is_drafted in ((False, False), (None, True), (True, True)):
        (output,) = drafting.generate(PROMPTS[:1], params(speculative=speculative), use_tqdm=False)
        (sample,) = output.outputs
        assert (sample.num_draft_tokens > 0) == is_drafted
        assert 0 <= sample.num_accepted_tokens <= sample.num_draft_tokens


def test_asking_for_drafts_where_nobody_guesses_is_refused(plain: LLM) -> None:
    with pytest.raises(UnsupportedFeature, match="speculative_method") as caught:
        plain.generate(PROMPTS[:1], SamplingParams(speculative=True), use_tqdm=False)
    assert caught.value.field == "speculative"
    with pytest.raises(InvalidParameter, match="with a strategy"):
        SamplingParams(speculative=True, strategy=SAMPLING)
    for value in (1, "no"):
        with pytest.raises(InvalidParameter) as invalid:
            SamplingParams(speculative=value)  # type: ignore[arg-type]
        assert invalid.value.field == "speculative"


def test_a_reset_of_the_cache_forgets_outputs_too() -> None:
    llm = load("suffix")
    params = SamplingParams(temperature=0.0, max_tokens=60)

    def accepted() -> int:
        return llm.generate(PROMPTS[:1], params, use_tqdm=False)[0].outputs[0].num_accepted_tokens

    accepted()
    assert accepted() > 20
    llm.reset_prefix_cache()
    assert accepted() < 20


def test_counts_add_up_in_outputs_stats_and_metrics() -> None:
    llm = load("suffix", num_speculative_tokens=3)
    metrics = Metrics("bundled")
    num_drafted = num_accepted = 0
    for idx in range(4):
        llm.engine.add_request(str(idx), PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=60))
        while llm.engine.has_unfinished:
            outputs = llm.engine.step()
            metrics.on_step(llm.engine.measure())
        (sample,) = outputs[0].outputs
        num_drafted += sample.num_draft_tokens
        num_accepted += sample.num_accepted_tokens
    stats, values = llm.stats, samples(metrics)
    assert 0 < num_accepted < num_drafted
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (num_drafted, num_accepted)
    assert values["vllm:spec_decode_num_drafts_total"] == stats.num_drafts > 0
    assert values["vllm:spec_decode_num_draft_tokens_total"] == num_drafted
    assert values["vllm:spec_decode_num_accepted_tokens_total"] == num_accepted
    places = [values[f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{position={place}}}"] for place in range(3)]
    assert sum(places) == num_accepted
    assert places == sorted(places, reverse=True)


def test_prompt_lookup_finds_what_repeats() -> None:
    """With three tokens to choose from, an output soon says again what it said."""
    llm = load("ngram")
    params = SamplingParams(temperature=0.0, max_tokens=120, allowed_token_ids=(300, 301, 302))
    before = llm.stats.num_steps
    (output,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    assert output.outputs[0].num_accepted_tokens > 60
    assert llm.stats.num_steps - before < 60


def test_lines_at_the_start_name_the_method(plain: LLM, drafting: LLM) -> None:
    for llm, is_shown in ((plain, False), (drafting, True)):
        assert any("Speculative decoding: suffix" in line for line in llm.resolved.lines()) == is_shown
