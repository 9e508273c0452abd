"""Thinking budgets and grammars after thinking, on the bundled model, with ordinary tokens as markers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.llm import LLM
from quire.engine.outputs.outputs import CompletionOutput
from quire.errors import InvalidParameter, UnsupportedFeature
from quire.sequences.params import SamplingParams
from quire.sequences.structured import StructuredOutputs
from quire.sequences.thinking import ThinkingTokens
from tests.engine.bundled import load
from tests.server import reasoning_checkpoint
from tests.server.tool_answers import PARIS, WEATHER

STORY = "Once upon a time, a small fox found a red kite in the forest. "
OTHERS = [STORY + "Then", STORY + "But", "Tom and the fox went", STORY * 2]
START, END = 90, (91, 92)
OPEN = ThinkingTokens(START, END, (89, *END))
# The prompt's last token opens thinking.
BUDGETS = (0, 1, 7, 24)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = load()
    yield llm
    assert llm.usage().used == 0
    llm.close()


def prompts(llm: LLM, texts: list[str]) -> list[list[int]]:
    return [[*llm.get_tokenizer().encode(text), START] for text in texts]


def thinking(budget: int | None, **more: Any) -> SamplingParams:
    usual: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 60, "thinking": OPEN}
    return SamplingParams(**(usual | {"thinking_token_budget": budget} | more))


def run(llm: LLM, each: list[SamplingParams]) -> list[list[CompletionOutput]]:
    many = [prompts(llm, OTHERS)[idx % len(OTHERS)] for idx in range(len(each))]
    outputs = llm.generate(many, each, use_tqdm=False)
    assert all(output.error is None for output in outputs)
    return [output.outputs for output in outputs]


def ids(outputs: list[list[CompletionOutput]]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in samples] for samples in outputs]


@pytest.fixture(scope="module")
def in_plenty(llm: LLM) -> list[list[list[int]]]:
    return ids(run(llm, [thinking(budget, n=1 + idx % 2) for idx, budget in enumerate(BUDGETS * 2)]))


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_a_budget_forces_the_end_and_changes_nothing_before_it(llm: LLM, temperature: float) -> None:
    (free,) = run(llm, [thinking(None, temperature=temperature)])
    for budget in BUDGETS:
        (samples,) = run(llm, [thinking(budget, temperature=temperature)])
        token_ids = samples[0].token_ids
        assert token_ids[: budget + 3] == [*free[0].token_ids[:budget], *OPEN.close_ids]
        # The answer is what the model writes after these tokens; draws depend on the position and the seed alone.
        prompt = [*prompts(llm, OTHERS)[0], *token_ids[: budget + 3]]
        rest = SamplingParams(temperature=temperature, seed=3, max_tokens=57 - budget)
        (after,) = llm.generate([prompt], rest, use_tqdm=False)
        assert token_ids[budget + 3 :] == after.outputs[0].token_ids


def test_forced_tokens_take_no_step_and_have_log_probabilities_where_asked(llm: LLM) -> None:
    before = llm.stats.num_steps
    (fast,) = run(llm, [thinking(4, max_tokens=12)])
    between = llm.stats.num_steps
    (slow,) = run(llm, [thinking(4, max_tokens=12, logprobs=0)])
    assert fast[0].token_ids == slow[0].token_ids
    assert len(slow[0].logprobs or ()) == 12
    assert llm.stats.num_steps - between - (between - before) == len(OPEN.close_ids)


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 10, "max_model_len": 128},
        {"num_kv_blocks": 10, "max_model_len": 128, "swap_space": 1 << 26, "preemption_mode": "swap"},
        {"max_num_batched_tokens": 16},
        {"speculative_method": "suffix", "num_speculative_tokens": 5},
    ],
    ids=["recompute", "swap", "chunks", "drafts"],
)
def test_nothing_changes_when_memory_is_short_or_tokens_are_drafted(
    in_plenty: list[list[list[int]]], options: dict[str, Any]
) -> None:
    tight = load(**options)
    each = [thinking(budget, n=1 + idx % 2) for idx, budget in enumerate(BUDGETS * 2)]
    assert ids(run(tight, each)) == in_plenty
    if "num_kv_blocks" in options:
        assert tight.stats.num_preemptions > 0
    assert tight.usage().used == 0
    tight.close()


def test_an_output_that_is_closed_by_the_prompt_has_no_budget(llm: LLM) -> None:
    closed = [*prompts(llm, OTHERS)[0], *END]
    free = SamplingParams(temperature=0.0, max_tokens=20)
    (expected,) = llm.generate([closed], free, use_tqdm=False)
    (output,) = llm.generate([closed], thinking(0, temperature=0.0, max_tokens=20), use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


# ---- grammars after thinking ----

ANSWER = StructuredOutputs(json={"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
                                 "additionalProperties": False})  # fmt: skip


def answer_of(llm: LLM, token_ids: list[int]) -> str:
    """Return the text after the end of thinking, which is there once at least."""
    text = "".join(chr(token_id) for token_id in token_ids)
    return llm.get_tokenizer().decode(token_ids[text.index("".join(map(chr, END))) + len(END) :])


@pytest.mark.parametrize("drafts", [{}, {"speculative_method": "suffix", "num_speculative_tokens": 5}])
def test_a_grammar_begins_where_thinking_ends(llm: LLM, drafts: dict[str, Any]) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    engine = load(**drafts) if drafts else llm
    # Greedy: without the end tokens, which the grammar forbids, draws would be others.
    more: dict[str, Any] = {"structured_outputs": ANSWER, "max_tokens": 120, "temperature": 0.0}
    each = [thinking(budget, **more) for budget in BUDGETS]
    free = run(llm, [thinking(None, temperature=0.0) for _ in BUDGETS])
    for budget, samples, unbound in zip(BUDGETS, run(engine, each), free, strict=True):
        assert samples[0].token_ids[:budget] == unbound[0].token_ids[:budget]
        assert json.loads(answer_of(llm, samples[0].token_ids))["n"] in (1, 2)
        assert samples[0].finish_reason == "stop"


@pytest.mark.parametrize("budget", BUDGETS)
def test_beams_think_within_the_budget_and_answer_in_form(llm: LLM, budget: int) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    params: dict[str, Any] = {"temperature": 1.0, "beam_width": 3, "n": 3, "max_tokens": 120, "seed": None}
    (samples,) = run(llm, [thinking(budget, structured_outputs=ANSWER, **params)])
    assert len({tuple(sample.token_ids) for sample in samples}) == 3
    for sample in samples:
        assert sample.token_ids[budget : budget + 3] == list(OPEN.close_ids)
        assert json.loads(answer_of(llm, sample.token_ids))["n"] in (1, 2)


def test_an_output_may_think_first_or_answer_at_once(llm: LLM) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    prompt = llm.get_tokenizer().encode(STORY)
    params: dict[str, Any] = {"structured_outputs": ANSWER, "max_tokens": 120}
    # With these biases, the marker is the unlikeliest first token, and the likeliest; it is no part of the grammar.
    at_once = thinking(5, **params, logit_bias={START: -100.0})
    (plain,) = llm.generate([prompt], at_once, use_tqdm=False)
    assert json.loads(plain.outputs[0].text)["n"] in (1, 2)
    biased = thinking(5, **params, logit_bias={START: 100.0})
    (thought,) = llm.generate([prompt], biased, use_tqdm=False)
    token_ids = thought.outputs[0].token_ids
    assert token_ids[0] == START
    assert token_ids[6:9] == list(OPEN.close_ids)
    assert json.loads(answer_of(llm, token_ids))["n"] in (1, 2)


def test_a_grammar_forbids_the_end_of_the_output_inside_thinking(llm: LLM) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    ends = dict.fromkeys(llm.engine.requests.end_token_ids, 100.0)
    (samples,) = run(llm, [thinking(6, structured_outputs=ANSWER, logit_bias=ends, max_tokens=120)])
    assert json.loads(answer_of(llm, samples[0].token_ids))["n"] in (1, 2)
    (samples,) = run(llm, [thinking(6, logit_bias=ends)])
    assert len(samples[0].token_ids) == 1


@pytest.mark.parametrize("bad", [-1, True, "5", 1.5])
def test_a_budget_is_a_number_of_tokens(bad: Any) -> None:
    with pytest.raises(InvalidParameter, match="thinking_token_budget"):
        thinking(bad)


def test_a_budget_needs_markers(llm: LLM) -> None:
    with pytest.raises(UnsupportedFeature, match="thinking_token_budget"):
        llm.generate(STORY, SamplingParams(thinking_token_budget=5), use_tqdm=False)


def test_chats_in_python_tell_reasoning_and_content(tmp_path: Path) -> None:
    model = str(reasoning_checkpoint.save(tmp_path / "model", "think"))
    messages = [{"role": "user", "content": "hi"}]
    with LLM(model, num_kv_blocks=64, max_model_len=512, num_threads=1) as thinker:
        params = SamplingParams(temperature=0, max_tokens=50)
        (sample,) = thinker.chat(messages, params, use_tqdm=False)[0].outputs
        assert (sample.reasoning, sample.content) == ("Hm, so it is", "Yes!")
        assert sample.text == "<think>Hm, so it is</think>Yes!"
        short = SamplingParams(temperature=0, max_tokens=50, thinking_token_budget=1)
        (sample,) = thinker.chat([messages], short, use_tqdm=False)[0].outputs
        assert (sample.reasoning, sample.content) == ("Hm", "Yes!")
        (sample,) = thinker.chat(messages, params, use_tqdm=False, reasoning_parser="none")[0].outputs
        assert (sample.reasoning, sample.content) == (None, None)
        with pytest.raises(InvalidParameter, match="reasoning_parser"):
            thinker.chat(messages, params, use_tqdm=False, reasoning_parser="other")
        if importlib.util.find_spec("llguidance") is not None:
            roomy = SamplingParams(temperature=0, max_tokens=200)
            (output,) = thinker.chat(messages, roomy, use_tqdm=False, tools=[WEATHER], tool_choice="required")
            assert output.outputs[0].reasoning == "Hm, so it is"
            assert output.outputs[0].content == ""
            assert [(call.name, call.arguments) for call in output.outputs[0].tool_calls] == [("get_weather", PARIS)]
