"""Structured outputs on the bundled model: they have their form, and do not disturb other requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance", reason="llguidance is not installed")

from quire import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from quire.engine.outputs.outputs import CompletionOutput, RequestOutput
from quire.errors import InvalidParameter, UnsupportedFeature
from quire.execution.runners import build
from quire.execution.sampling.device.device_draws import TorchDraws
from quire.execution.sampling.sampler import Sampler
from tests.engine.bundled import load
from tests.engine.structured_forms import CHOICES, SCHEMA, WANTED, is_right
from tests.structured.test_compile_sandbox import TIME_BOMB

STORY = "Once upon a time, a small fox"
OTHERS = ["Tom found a red kite", "The old sailor", "A cow and a bee"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = load()
    yield llm
    assert llm.usage().used == 0
    llm.close()


def wild(kind: str, **params: Any) -> SamplingParams:
    """Return parameters that draw almost any token that the grammar has."""
    usual: dict[str, Any] = {"temperature": 2.0, "max_tokens": 300, "seed": 5, "structured_outputs": WANTED[kind]}
    return SamplingParams(**(usual | params))


def run(llm: LLM, prompts: Any, params: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def only_a_z(_prompt: list[int], _output: list[int], logits: torch.Tensor) -> torch.Tensor:
    mine = torch.full_like(logits, -torch.inf)
    mine[95] = 0.0
    return mine


def only(llm: LLM, params: SamplingParams, prompt: str = STORY) -> CompletionOutput:
    (output,) = run(llm, prompt, params)
    assert output.error is None
    return output.outputs[0]


# ---- the form ----


@pytest.mark.parametrize("kind", sorted(WANTED))
def test_random_walks_have_the_form(llm: LLM, kind: str) -> None:
    each = [wild(kind, seed=seed, n=2, temperature=1.0 if kind == "object" else 2.0) for seed in range(5)]
    outputs = run(llm, [STORY] * 5, each)
    whole = [sample for output in outputs for sample in output.outputs if sample.finish_reason == "stop"]
    cut = [sample for output in outputs for sample in output.outputs if sample.finish_reason != "stop"]
    assert all(is_right(kind, sample.text) for sample in whole)
    assert all(sample.finish_reason == "length" and len(sample.token_ids) == 300 for sample in cut)
    assert len({sample.text for sample in whole}) > (kind != "object")
    if kind != "object":
        assert not cut, "they cannot go on for ever"


def test_each_form_in_one_batch(llm: LLM) -> None:
    kinds = sorted(WANTED)
    alone = [only(llm, wild(kind)).token_ids for kind in kinds]
    together = run(llm, [STORY] * len(kinds), [wild(kind) for kind in kinds])
    assert [output.outputs[0].token_ids for output in together] == alone


def test_tokens_of_others_in_the_batch_do_not_change(llm: LLM) -> None:
    free = [SamplingParams(temperature=t, max_tokens=40, seed=3) for t in (0.0, 0.9, 1.4)]
    alone = [output.outputs[0].token_ids for output in run(llm, OTHERS, free)]
    mixed = run(llm, [*OTHERS, STORY, STORY], [*free, wild("compact"), wild("regex")])
    assert [output.outputs[0].token_ids for output in mixed[:3]] == alone
    assert is_right("compact", mixed[3].outputs[0].text)
    assert is_right("regex", mixed[4].outputs[0].text)


def test_rows_that_had_a_mask_are_free_afterwards() -> None:
    llm = load(max_num_seqs=2)
    greedy = SamplingParams(temperature=0.0, max_tokens=30)
    (before,) = run(llm, OTHERS[0], greedy)
    # Short ones leave their places to the free ones in the middle of the run.
    prompts = [STORY, STORY, OTHERS[0], STORY, OTHERS[0], OTHERS[0]]
    each = [wild("choice"), wild("choice", seed=6), greedy, wild("choice", seed=7), greedy, greedy]
    outputs = run(llm, prompts, each)
    assert all(outputs[place].outputs[0].text in CHOICES for place in (0, 1, 3))
    assert all(outputs[place].outputs[0].token_ids == before.outputs[0].token_ids for place in (2, 4, 5))
    llm.close()


def test_greedy_takes_the_likeliest_of_what_is_allowed(llm: LLM) -> None:
    free = only(llm, SamplingParams(temperature=0.0, max_tokens=1)).text
    for choice in (["zebra", free], ["zebra"]):
        greedy = wild("choice", temperature=0.0, structured_outputs={"choice": choice})
        assert only(llm, greedy).text == choice[-1]


# ---- forced tokens ----


@pytest.mark.parametrize("text", ["a<|eos|>b", "<|end|>", "x<|user|>é<|bos|>", "<|eos|>🦄<|user|> so"])
@pytest.mark.parametrize("more", [{}, {"logprobs": 0}, {"n": 2}, {"beam_width": 2, "n": 1}], ids=str)
def test_letters_of_special_tokens_are_written_as_letters(llm: LLM, text: str, more: dict[str, Any]) -> None:
    """The tokenizer would write them as one token, which the text does not show and which may end the output."""
    for form in ({"choice": [text]}, {"choice": [f"{text}.", f"{text}!"]}, {"json": {"const": text}}):
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60, "structured_outputs": form} | more
        (output,) = run(llm, STORY, SamplingParams(**params))
        assert output.error is None
        for sample in output.outputs:
            assert sample.finish_reason == "stop"
            assert text == (json.loads(sample.text) if "json" in form else sample.text.rstrip(".!"))


@pytest.mark.parametrize("kind", ["compact", "json", "choice", "grammar"])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_forced_tokens_are_those_that_are_drawn_one_by_one(llm: LLM, kind: str, temperature: float) -> None:
    params = {"temperature": temperature, "n": 3 if temperature else 1}
    before = llm.stats.num_steps
    (fast,) = run(llm, STORY, wild(kind, **params))
    between = llm.stats.num_steps
    # Where log probabilities are wanted, each token is computed.
    (slow,) = run(llm, STORY, wild(kind, **params, logprobs=0))
    assert [sample.token_ids for sample in fast.outputs] == [sample.token_ids for sample in slow.outputs]
    assert [sample.text for sample in fast.outputs] == [sample.text for sample in slow.outputs]
    assert all(len(sample.logprobs or ()) == len(sample.token_ids) for sample in slow.outputs)
    if kind in ("compact", "grammar"):
        assert between - before < llm.stats.num_steps - between


def test_forced_tokens_end_with_max_tokens(llm: LLM) -> None:
    whole = only(llm, wild("compact"))
    for max_tokens in range(1, 24):
        cut = only(llm, wild("compact", max_tokens=max_tokens))
        assert cut.token_ids == whole.token_ids[:max_tokens]
        assert cut.finish_reason == "length"


def test_stop_strings_and_tokens_end_a_run(llm: LLM) -> None:
    whole = only(llm, wild("compact")).text
    stopped = only(llm, wild("compact", stop='"age'))
    assert stopped.text == whole.partition('"age')[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", '"age')
    assert llm.tokenizer is not None
    comma = llm.tokenizer.encode(",", add_special_tokens=False)[-1]
    ended = only(llm, wild("compact", stop_token_ids=[comma]))
    assert ended.finish_reason in ("stop", "length")
    if ended.stop_reason is not None:
        assert ended.token_ids.index(comma) == len(ended.token_ids) - 1


# ---- memory ----


def twelve() -> tuple[list[str], list[SamplingParams]]:
    """Return prompts, and parameters of four forms."""
    kinds = ["compact", "json", "regex", "grammar"] * 3
    return [STORY, *OTHERS] * 3, [wild(kind, seed=seed) for seed, kind in enumerate(kinds)]


@pytest.fixture(scope="module")
def in_plenty(llm: LLM) -> list[list[int]]:
    """The tokens of twelve requests with memory to spare."""
    return [output.outputs[0].token_ids for output in run(llm, *twelve())]


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 14, "max_model_len": 192, "enable_prefix_caching": False},
        {"num_kv_blocks": 14, "max_model_len": 192},
        {"num_kv_blocks": 14, "max_model_len": 192, "swap_space": 1 << 26, "preemption_mode": "swap"},
        {"max_num_batched_tokens": 16},
    ],
    ids=["recompute", "hits", "swap", "chunks"],
)
def test_nothing_changes_when_memory_is_short(in_plenty: list[list[int]], options: dict[str, Any]) -> None:
    prompts, each = twelve()
    tight = load(**options)
    assert [output.outputs[0].token_ids for output in run(tight, prompts, each)] == in_plenty
    if "num_kv_blocks" in options:
        assert tight.stats.num_preemptions > 0
    assert tight.usage().used == 0
    tight.close()


def test_samples_have_ways_of_their_own_and_best_of_ranks_them(llm: LLM) -> None:
    (several,) = run(llm, STORY, wild("json", n=6))
    assert all(is_right("json", sample.text) for sample in several.outputs)
    assert len({sample.text for sample in several.outputs}) == 6
    (best,) = run(llm, STORY, wild("json", best_of=6))
    assert best.outputs[0].token_ids in [sample.token_ids for sample in several.outputs]


# ---- beside other parameters ----


def test_penalties_and_bias_choose_among_what_is_allowed(llm: LLM) -> None:
    assert llm.tokenizer is not None
    (token_id,) = llm.tokenizer.encode(" the", add_special_tokens=False)[-1:]
    params = wild("regex", repetition_penalty=1.5, dry_multiplier=1.0, logit_bias={token_id: 50.0}, top_k=20)
    assert is_right("regex", only(llm, params).text)


@pytest.mark.parametrize("seed", range(6))
def test_a_processor_with_logits_of_its_own_does_not_leave_the_form(llm: LLM, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def whatever(_prompt: list[int], _output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.randn(logits.shape, generator=generator) * 9

    assert only(llm, wild("choice", logits_processors=[whatever])).text in CHOICES


@pytest.mark.parametrize(
    "params",
    [
        {"structured_outputs": {"choice": ["yes", "no"]}, "logits_processors": [only_a_z]},
        {"structured_outputs": {"choice": ["yes", "no"]}, "min_tokens": 20},
        {"structured_outputs": {"choice": ["yes", "no"]}, "allowed_token_ids": [7]},
        {"structured_outputs": {"regex": "z{3}"}, "bad_words": ["z", "zz", "zzz"]},
    ],
)
def test_a_request_that_leaves_itself_no_token_ends_alone(llm: LLM, params: dict[str, Any]) -> None:
    good = SamplingParams(temperature=0.0, max_tokens=20)
    expected = only(llm, good).token_ids
    bad, other = run(llm, [STORY, STORY], [SamplingParams(max_tokens=30, **params), good])
    assert bad.outputs[0].finish_reason == "error"
    assert bad.error is not None
    assert "structured_outputs" in bad.error
    assert bad.error_code == "request_failed"
    assert other.outputs[0].token_ids == expected
    assert other.error is None
    assert other.error_code is None


def test_min_tokens_that_the_form_has_room_for_are_had(llm: LLM) -> None:
    output = only(llm, wild("regex", structured_outputs={"regex": "a*"}, min_tokens=9, max_tokens=12, temperature=0.0))
    assert len(output.token_ids) >= 9
    assert set(output.text) == {"a"}


def test_token_ids_alone_have_the_form_too(llm: LLM) -> None:
    assert llm.tokenizer is not None
    output = only(llm, wild("regex", detokenize=False))
    assert is_right("regex", llm.tokenizer.decode(output.token_ids))


# ---- what is refused ----


def test_what_does_not_compile_is_refused_and_nothing_runs(llm: LLM) -> None:
    before = llm.stats.num_steps
    bad = SamplingParams(structured_outputs=StructuredOutputs(regex="("))
    with pytest.raises(InvalidParameter, match="unclosed group") as caught:
        llm.generate([STORY, STORY], [SamplingParams(), bad], use_tqdm=False)
    assert caught.value.field == "structured_outputs.regex"
    assert llm.stats.num_steps == before
    assert not llm.engine.has_unfinished


def test_an_engine_without_a_tokenizer_has_no_grammars() -> None:
    bare = load(skip_tokenizer_init=True)
    with pytest.raises(UnsupportedFeature) as caught:
        bare.generate([1, 2], wild("regex", detokenize=False), use_tqdm=False)
    assert caught.value.field == "structured_outputs"
    bare.close()


def test_a_bomb_is_refused_while_others_are_served() -> None:
    llm = AsyncLLM.from_options(num_kv_blocks=256, num_threads=1, max_model_len=512, grammar_timeout_s=1.0)

    async def collect(params: SamplingParams) -> tuple[str, float]:
        text = ""
        async for output in llm.generate(STORY, params):
            text += output.outputs[0].text
        return text, asyncio.get_running_loop().time()

    async def serve() -> None:
        bombs = [asyncio.ensure_future(collect(SamplingParams(structured_outputs=TIME_BOMB))) for _ in range(2)]
        await asyncio.sleep(0.1)
        free = [collect(SamplingParams(temperature=0.0, max_tokens=10)) for _ in range(3)]
        texts = await asyncio.gather(*free)
        assert len({text for text, _ in texts}) == 1
        assert not any(bomb.done() for bomb in bombs), "the others did not wait for them"
        for bomb in bombs:
            with pytest.raises(InvalidParameter, match="grammar_timeout_s"):
                await bomb
        text, _ = await collect(wild("choice"))
        assert text in CHOICES

    asyncio.run(serve())
    llm.shutdown()


def test_samples_of_like_requests_keep_to_their_own_parameters(llm: LLM) -> None:
    """The same form, seed and length of prompt: one request has forced tokens appended, the other measures each."""
    each = [wild("json", temperature=0.7, max_tokens=40, n=2, logprobs=logprobs) for logprobs in (None, 1)]
    plain, measured = (output.outputs for output in run(llm, [STORY] * 2, each))
    assert [sample.token_ids for sample in plain] == [sample.token_ids for sample in measured]
    assert [len(sample.logprobs or ()) for sample in measured] == [len(sample.token_ids) for sample in measured]


# ---- beside drafts and beams ----


@pytest.mark.parametrize(
    ("method", "place"),
    [("ngram", "host"), ("suffix", "host"), ("ngram", "device"), ("draft", "host"), ("draft", "device")],
    ids=str,
)
@pytest.mark.slow
def test_drafts_change_nothing(llm: LLM, method: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_sampler(device: Any, grammar_states: Any, keep: Any, _: Any, deferred: Any) -> Sampler:
        return Sampler(device, grammar_states, keep, TorchDraws() if place == "device" else None, deferred)

    monkeypatch.setattr(build, "Sampler", make_sampler)
    several = {"json": {"type": "array", "items": SCHEMA, "minItems": 2, "maxItems": 3}}
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.6}, {"temperature": 0.6, "logprobs": 1}]
    each = [
        wild("json", structured_outputs=form, max_tokens=200, **kind)
        for form in (several, WANTED["grammar"], WANTED["json"])
        for kind in kinds
    ]
    each.append(wild("compact", temperature=0.6, stop='"kind"', repetition_penalty=1.1))
    each.append(wild("regex", n=3, temperature=0.5))
    expected = [[sample.token_ids for sample in output.outputs] for output in run(llm, [STORY] * len(each), each)]
    guessing = load(
        speculative_method=method,
        draft_model="bundled" if method == "draft" else None,
        num_speculative_tokens=6,
        num_kv_blocks=1024,
    )
    for _ in range(2):
        outputs = run(guessing, [STORY] * len(each), each)
        assert [[sample.token_ids for sample in output.outputs] for output in outputs] == expected
    assert guessing.stats.num_accepted_tokens > 20
    assert guessing.stats.num_draft_tokens > guessing.stats.num_accepted_tokens, "some drafts were wrong"
    assert guessing.usage().used == 0
    guessing.close()


@pytest.mark.parametrize("kind", ["choice", "compact", "grammar", "regex"])
@pytest.mark.parametrize("beam_width", [2, 5])
def test_beams_have_the_form(llm: LLM, kind: str, beam_width: int) -> None:
    form = StructuredOutputs(**({"choice": (*CHOICES, "later")} if kind == "choice" else WANTED[kind]))
    params = SamplingParams(beam_width=beam_width, n=2, max_tokens=150, structured_outputs=form, temperature=0.0)
    (output,) = run(llm, STORY, params)
    assert output.error is None
    assert output.outputs[0].token_ids != output.outputs[1].token_ids, "though the text may be the same"
    for sample in output.outputs:
        assert sample.finish_reason == "stop"
        assert sample.text in [*CHOICES, "later"] if kind == "choice" else is_right(kind, sample.text)
