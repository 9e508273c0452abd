"""Bad words, repetition limits and custom logits processors, in a running engine on the bundled model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import InvalidParameter, RequestError, UnsupportedFeature

STORY = "Once upon a time, a small fox"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(num_kv_blocks=128, num_threads=1, max_model_len=512)
    yield llm
    assert llm.usage().used == 0


def told(llm: LLM, prompt: str = STORY, **params: Any) -> str:
    (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=40, **params), use_tqdm=False)
    assert output.error is None
    return output.outputs[0].text


def test_bad_words_do_not_come(llm: LLM) -> None:
    words = {word for word in told(llm).split() if word.isalpha() and len(word) > 2}
    assert words
    for word in sorted(words):
        assert f" {word} " not in told(llm, bad_words=[word]), word
    without = told(llm, bad_words=sorted(words))
    assert not words & set(without.split())


def test_a_repetition_is_broken_off(llm: LLM) -> None:
    assert llm.tokenizer is not None
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
    song = llm.tokenizer.encode(STORY)
    first = llm.generate({"prompt_token_ids": song}, SamplingParams(**greedy), use_tqdm=False)[0].outputs[0].token_ids
    sung = {"prompt_token_ids": [*song, *first, *song]}
    params = [SamplingParams(**greedy), SamplingParams(**greedy, dry_multiplier=50.0)]
    again, other = llm.generate([sung, sung], params, use_tqdm=False)
    assert again.outputs[0].token_ids[0] == first[0]
    assert other.outputs[0].token_ids[0] != first[0]


@pytest.mark.parametrize("params", [{"typical_p": 0.2}, {"top_n_sigma": 0.5}])
def test_a_narrow_filter_lets_no_unlikely_token_come(llm: LLM, params: dict[str, Any]) -> None:
    wild = SamplingParams(temperature=30.0, max_tokens=20, seed=5, logprobs=0)
    ranks = []
    for changed in ({}, params):
        given = SamplingParams(**{"temperature": 1.0, "max_tokens": 20, "seed": 5, "logprobs": 0} | changed)
        (output,) = llm.generate(STORY, wild if not changed else given, use_tqdm=False)
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        ranks.append(max(entry.rank or 0 for position in logprobs for entry in position.values()))
    assert ranks[1] < 50 < ranks[0]


def test_a_processor_steers_its_own_request_only(llm: LLM) -> None:
    assert llm.tokenizer is not None
    (fox,) = llm.tokenizer.encode(" fox", add_special_tokens=False)[:1]

    def only_foxes(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits.fill_(-torch.inf)
        logits[fox] = float(len(prompt) + len(output))
        return logits

    def fail(*_: Any) -> torch.Tensor:
        raise ValueError("no taste")

    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
    params = [
        SamplingParams(**greedy),
        SamplingParams(**greedy, logits_processors=(only_foxes,)),
        SamplingParams(**greedy, logits_processors=(fail,)),
    ]
    alone = llm.generate(STORY, params[0], use_tqdm=False)[0].outputs[0].token_ids
    plain, steered, failed = llm.generate([STORY] * 3, params, use_tqdm=False)
    assert plain.outputs[0].token_ids == alone
    assert steered.outputs[0].token_ids == [fox] * 6
    assert failed.outputs[0].finish_reason == "error"
    assert "fail raised ValueError: no taste" in (failed.error or "")


def test_impossible_options_are_refused_before_any_step(llm: LLM) -> None:
    assert llm.tokenizer is not None
    (fox,) = {tuple(llm.tokenizer.encode(" x", add_special_tokens=False))}
    bare = LLM(num_kv_blocks=16, num_threads=1, max_model_len=64, skip_tokenizer_init=True)
    cases: list[tuple[LLM, dict[str, Any], str, type[RequestError]]] = [
        (bare, {"bad_words": ["a"]}, "bad_words", UnsupportedFeature),
        (bare, {"dry_multiplier": 1.0}, "dry_sequence_breakers", UnsupportedFeature),
        (llm, {"bad_words": ["\ud800"]}, "bad_words", InvalidParameter),
        (llm, {"bad_words": ["x"], "allowed_token_ids": [fox[-1]]}, "bad_words", InvalidParameter),
    ]
    for engine, params, field, error in cases:
        with pytest.raises(error) as caught:
            engine.engine.add_request("bad", {"prompt_token_ids": [5]}, SamplingParams(**params))
        assert caught.value.field == field
        assert not engine.engine.has_unfinished
    bare.generate({"prompt_token_ids": [5]}, SamplingParams(max_tokens=2, dry_multiplier=1.0, dry_sequence_breakers=()))
