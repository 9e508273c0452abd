"""Beam search in a running engine: texts, ends, memory at every step, and what is counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.engine.outputs.outputs import CompletionOutput, RequestOutput
from quire.errors import PromptTooLong, UnsupportedFeature
from quire.memory import check

STORY = "Once upon a time, a small fox"
BLOCK = 8


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(num_kv_blocks=600, block_size=BLOCK, num_threads=1, max_model_len=512, max_num_seqs=128)
    yield llm
    assert llm.usage().used == 0


def search(llm: LLM, prompt: str | list[int] = STORY, **params: Any) -> RequestOutput:
    settings: dict[str, Any] = {"beam_width": 4, "n": 4, "max_tokens": 16, **params}
    (output,) = llm.generate(prompt, SamplingParams(**settings), use_tqdm=False)
    assert not llm.engine.scheduler.sequences
    return output


def test_texts_are_those_of_the_tokens_best_first(llm: LLM) -> None:
    output = search(llm)
    assert output.finished
    assert [one.index for one in output.outputs] == [0, 1, 2, 3]
    scores = [one.beam_score or 0.0 for one in output.outputs]
    assert scores == sorted(scores, reverse=True)
    assert llm.tokenizer is not None
    for one in output.outputs:
        assert one.text == llm.tokenizer.decode(one.token_ids, skip_special_tokens=True)
        assert (one.finish_reason, one.logprobs, one.cumulative_logprob) == ("length", None, None)
    assert len({one.text for one in output.outputs}) == 4


def test_scores_are_sums_of_log_probabilities_by_length(llm: LLM) -> None:
    for penalty in (1.0, 0.0, 2.0):
        for one in search(llm, length_penalty=penalty, logprobs=2, max_tokens=9).outputs:
            assert one.logprobs is not None
            assert len(one.logprobs) == len(one.token_ids)
            assert [next(iter(position)) for position in one.logprobs] == one.token_ids
            total = sum(position[token].logprob for position, token in zip(one.logprobs, one.token_ids, strict=True))
            assert one.cumulative_logprob == pytest.approx(total, abs=1e-4)
            assert one.beam_score == pytest.approx(total / len(one.token_ids) ** penalty, abs=1e-4)


def test_a_wider_search_finds_what_is_at_least_as_likely(llm: LLM) -> None:
    greedy = llm.generate(STORY, SamplingParams(temperature=0.0, max_tokens=12, logprobs=0), use_tqdm=False)[0].outputs
    assert greedy[0].cumulative_logprob is not None
    best = search(llm, n=1, beam_width=16, max_tokens=12, length_penalty=0.0, ignore_eos=True).outputs[0]
    assert best.beam_score is not None
    assert best.beam_score >= greedy[0].cumulative_logprob - 1e-4


@pytest.mark.parametrize("included", [False, True])
def test_a_hypothesis_ends_with_a_stop_string(llm: LLM, included: bool) -> None:
    output = search(llm, stop=[". ", "."], include_stop_str_in_output=included, max_tokens=32)
    assert all(one.finish_reason in ("stop", "length") for one in output.outputs)
    stopped = [one for one in output.outputs if one.stop_reason == "."]
    assert stopped
    for one in stopped:
        assert one.text.count(".") == int(included)
        assert one.text.endswith(".") == included


def test_a_stop_string_across_tokens_ends_only_the_beams_that_reach_it(llm: LLM) -> None:
    """What is held back belongs to its own beam: the slow way is to look at each hypothesis' whole text."""
    plain = search(llm, max_tokens=12, beam_width=8, n=8)
    word = plain.outputs[0].text[-9:-2]
    output = search(llm, max_tokens=12, beam_width=8, n=8, stop=[word])
    assert llm.tokenizer is not None
    reached = 0
    for one in output.outputs:
        text = llm.tokenizer.decode(one.token_ids, skip_special_tokens=True)
        assert (word in text) == (one.stop_reason == word)
        reached += word in text
        if one.stop_reason == word:
            assert one.text == text[: text.index(word)]
            assert word not in llm.tokenizer.decode(one.token_ids[:-1], skip_special_tokens=True)
    assert reached > 0


def test_stop_tokens_and_the_least_length(llm: LLM) -> None:
    first = search(llm, max_tokens=6).outputs[0].token_ids
    output = search(llm, max_tokens=6, stop_token_ids=[first[2]], length_penalty=0.0)
    assert any(one.stop_reason == first[2] for one in output.outputs)
    assert all(first[2] not in one.token_ids[:-1] for one in output.outputs)
    later = search(llm, max_tokens=6, stop_token_ids=[first[2]], min_tokens=5)
    assert all(first[2] not in one.token_ids[:5] for one in later.outputs)


def test_nothing_is_shown_before_the_end(llm: LLM) -> None:
    deltas = list(llm.stream(STORY, SamplingParams(beam_width=3, n=2, max_tokens=6, prompt_logprobs=0)))
    (last,) = deltas
    assert last.finished
    assert [one.index for one in last.outputs] == [0, 1]
    assert last.prompt_logprobs is not None
    assert len(last.prompt_logprobs) == len(last.prompt_token_ids)
    times = last.metrics
    assert times.first_token_s is not None
    assert times.finished_s is not None
    assert times.arrival_s < times.first_token_s < times.finished_s


def test_tokens_of_beams_that_were_given_up_are_counted_apart(llm: LLM) -> None:
    before = llm.stats.generation_tokens
    output = search(llm, n=1, max_tokens=10, ignore_eos=True)
    assert len(output.outputs[0].token_ids) == 10
    # In nine steps four beams were given a token each; in the last, four outputs ended.
    assert output.num_pruned_tokens == 4 * 10 - 10
    assert llm.stats.generation_tokens - before == 4 * 9


def test_an_aborted_search_says_so_for_each_output(llm: LLM) -> None:
    llm.engine.add_request("long", STORY, SamplingParams(beam_width=4, n=2, max_tokens=50))
    for _ in range(6):
        llm.engine.step()
    assert len(llm.engine.scheduler.running) == 4
    output = llm.engine.abort_request("long")
    assert output is not None
    assert [(one.index, one.finish_reason, one.token_ids) for one in output.outputs] == [
        (0, "abort", []),
        (1, "abort", []),
    ]
    assert llm.usage().used == 0


def test_a_search_that_is_left_no_token_fails_alone(llm: LLM) -> None:
    """Whoever forbids each word and its end has no candidate; the others of the step do not notice."""
    allowed = SamplingParams(beam_width=2, n=2, max_tokens=6, allowed_token_ids=(300, 301), ignore_eos=True)

    def nothing(_: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf) if len(output) == 3 else logits

    banned = SamplingParams(beam_width=2, n=2, max_tokens=6, logits_processors=[nothing])  # type: ignore[arg-type]
    bad, good = llm.generate([STORY, STORY], [banned, allowed], use_tqdm=False)
    assert [one.finish_reason for one in bad.outputs] == ["error", "error"]
    assert "no token is left" in (bad.error or "")
    assert [len(one.token_ids) for one in good.outputs] == [6, 6]
    assert good.error is None


def test_a_processor_that_raises_fails_its_own_search(llm: LLM) -> None:
    def fails(_: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output) == 2:
            raise ZeroDivisionError
        return logits

    broken = SamplingParams(beam_width=3, max_tokens=6, logits_processors=[fails])  # type: ignore[arg-type]
    bad, good = llm.generate([STORY, STORY], [broken, SamplingParams(beam_width=3, max_tokens=6)], use_tqdm=False)
    assert "ZeroDivisionError" in (bad.error or "")
    assert good.outputs[0].finish_reason == "length"


def test_there_may_be_fewer_outputs_than_asked_for(llm: LLM) -> None:
    """One token is allowed, and then the end: there are two outputs of up to two tokens, and no four."""
    ends = llm.engine.requests.end_token_ids
    allowed = (300, *sorted(ends)[:1])
    output = search(llm, max_tokens=2, allowed_token_ids=allowed)
    assert 1 < len(output.outputs) < 4
    assert len({tuple(one.token_ids) for one in output.outputs}) == len(output.outputs)


def test_beam_search_without_a_tokenizer_refuses_stop_strings() -> None:
    llm = LLM(num_kv_blocks=100, num_threads=1, max_model_len=256, skip_tokenizer_init=True)
    with pytest.raises(UnsupportedFeature):
        search(llm, [1, 2, 3], stop=["a"])
    output = search(llm, [50, 60, 70], max_tokens=4, ignore_eos=True)
    assert [len(one.token_ids) for one in output.outputs] == [4] * 4
    assert all(one.text == "" for one in output.outputs)


def test_a_search_that_never_fits_is_refused_with_the_limit() -> None:
    llm = LLM(num_kv_blocks=40, block_size=BLOCK, num_threads=1, max_model_len=256, max_num_seqs=16)
    params = SamplingParams(beam_width=8, max_tokens=30)
    prompt = list(range(50, 150))
    with pytest.raises(PromptTooLong) as caught:
        llm.engine.add_request("wide", prompt, params)
    # A block shared, and for each beam the 30 tokens and what its prompt has in the block before: five blocks at most.
    limit = int(str(caught.value).split()[-1])
    assert 0 < limit < 100
    assert "for each of 8 beams" in str(caught.value)
    llm.engine.add_request("as long as may be", prompt[:limit], params)
    while llm.engine.has_unfinished:
        llm.engine.step()
    with pytest.raises(PromptTooLong):
        llm.engine.add_request("one more", prompt[: limit + 1], params)


@pytest.mark.parametrize("width", [2, 4, 8, 16, 64])
def test_memory_is_that_of_distinct_tokens_and_two_blocks_a_beam(llm: LLM, width: int) -> None:
    """Measured at every step, as bytes that are held against the tree of tokens that the beams make up."""
    llm.reset_prefix_cache()
    engine, scheduler = llm.engine, llm.engine.scheduler
    block_bytes = scheduler.memory.groups[0].spec.bytes_per_block
    params = SamplingParams(beam_width=width, n=width, max_tokens=40, ignore_eos=True)
    engine.add_request("measured", STORY, params)
    forks = 0
    while engine.has_unfinished:
        seen = set(scheduler.sequences)
        engine.step()
        beams = scheduler.running
        forks += len(set(scheduler.sequences) - seen)
        distinct = {tuple(beam.tokens[: place + 1]) for beam in beams for place in range(beam.num_computed)}
        used_bytes = llm.usage().used_bytes
        assert used_bytes <= (len(distinct) / BLOCK + 2 * len(beams)) * block_bytes
        assert len(beams) <= width
        assert len(scheduler.sequences) <= width, "beams that were given up are gone"
        check(scheduler.memory)
    assert forks > width
    assert llm.usage().used == 0


def test_a_search_that_begins_again_finds_the_same() -> None:
    """Room for one of three; stop strings are looked for from the start again."""
    params = SamplingParams(beam_width=4, n=4, max_tokens=40, min_tokens=24, stop=(".",), early_stopping="never")
    prompts = [STORY, STORY + " and a dog", "Tom had a red kite"]
    roomy = LLM(num_kv_blocks=600, block_size=BLOCK, num_threads=1, max_model_len=128)
    expected = roomy.generate(prompts, params, use_tqdm=False)
    tight = LLM(num_kv_blocks=28, block_size=BLOCK, num_threads=1, max_model_len=128, max_num_seqs=32)
    found = tight.generate(prompts, params, use_tqdm=False)
    assert tight.stats.num_preemptions > 0
    assert tight.stats.wasted_tokens > 0
    assert [texts(output) for output in found] == [texts(output) for output in expected]


def texts(output: RequestOutput) -> list[tuple[str, str | None, str | int | None]]:
    def told(one: CompletionOutput) -> tuple[str, str | None, str | int | None]:
        return one.text, one.finish_reason, one.stop_reason

    return [told(one) for one in output.outputs]


@pytest.mark.parametrize("width", [2, 16])
def test_the_same_search_again_hits_its_prompt(llm: LLM, width: int) -> None:
    llm.reset_prefix_cache()
    first = search(llm, STORY * 2, beam_width=width, n=2)
    again = search(llm, STORY * 2, beam_width=width, n=2)
    assert again.num_cached_tokens > first.num_cached_tokens == 0
    assert [one.token_ids for one in again.outputs] == [one.token_ids for one in first.outputs]


def test_what_is_given_up_does_not_displace_what_is_cached() -> None:
    """Many searches pass through a small cache; blocks of beams that were given up are not kept in it half full."""
    llm = LLM(num_kv_blocks=120, block_size=BLOCK, num_threads=1, max_model_len=256, max_num_seqs=8)
    search(llm, max_tokens=24, ignore_eos=True)
    usage = llm.usage()
    # Full blocks of all beams, and a tail for each that was left at the end.
    assert usage.idle <= 8 + 4 * (24 // BLOCK + 1) + 4
