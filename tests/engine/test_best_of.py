"""The best of several samples, on the bundled model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.outputs.beam_outputs import BestOf
from quire.engine.outputs.outputs import CompletionOutput
from quire.errors import InvalidParameter

STORY = "Once upon a time, a small fox"
WILD: dict[str, Any] = {"temperature": 1.3, "max_tokens": 24, "seed": 3}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(num_kv_blocks=128, num_threads=1, max_model_len=512, max_num_seqs=8)
    yield llm
    assert llm.usage().used == 0


def mean_logprob(output: CompletionOutput) -> float:
    assert output.cumulative_logprob is not None
    return output.cumulative_logprob / len(output.token_ids)


def test_the_best_are_those_of_all_samples_by_mean_log_probability(llm: LLM) -> None:
    (every,) = llm.generate(STORY, SamplingParams(**WILD, n=6, logprobs=0), use_tqdm=False)
    (best,) = llm.generate(STORY, SamplingParams(**WILD, n=2, best_of=6), use_tqdm=False)
    ranked = sorted(every.outputs, key=mean_logprob, reverse=True)
    assert len({tuple(output.token_ids) for output in ranked}) == 6
    assert [output.index for output in ranked][:2] != [0, 1], "another seed would show more"
    assert [output.token_ids for output in best.outputs] == [output.token_ids for output in ranked[:2]]
    assert [output.text for output in best.outputs] == [output.text for output in ranked[:2]]
    assert [output.index for output in best.outputs] == [0, 1]
    assert [mean_logprob(output) for output in best.outputs] == [mean_logprob(output) for output in ranked[:2]]
    assert all(output.logprobs is None for output in best.outputs), "nobody asked for them"
    assert best.num_pruned_tokens == sum(len(output.token_ids) for output in ranked[2:])


def test_nothing_is_shown_before_the_samples_can_be_compared(llm: LLM) -> None:
    *before, last = llm.stream(STORY, SamplingParams(**WILD, best_of=3, logprobs=1))
    assert all(not delta.outputs for delta in before)
    (output,) = last.outputs
    assert output.finish_reason is not None
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)


def test_a_request_that_is_ended_early_shows_the_best_so_far(llm: LLM) -> None:
    llm.engine.add_request("long", STORY, SamplingParams(**WILD, best_of=4))
    for _ in range(6):
        llm.engine.step()
    output = llm.engine.abort_request("long")
    assert output is not None
    assert [(sample.index, sample.finish_reason) for sample in output.outputs] == [(0, "abort")]
    assert output.num_pruned_tokens == 3 * len(output.outputs[0].token_ids) > 0


def test_more_than_can_run_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="best_of must be at most max_num_seqs") as caught:
        llm.engine.add_request("wide", STORY, SamplingParams(**WILD, best_of=9))
    assert caught.value.field == "best_of"


def test_a_sample_without_a_token_is_the_last() -> None:
    ranking = BestOf(2)
    ranking.add([CompletionOutput(0, finish_reason="abort")])
    ranking.add([CompletionOutput(1, token_ids=[5, 5], cumulative_logprob=-9.0)])
    ranking.add([CompletionOutput(2, token_ids=[5], cumulative_logprob=-4.0)])
    best, num_dropped = ranking.best()
    assert [output.cumulative_logprob for output in best] == [-4.0, -9.0]
    assert num_dropped == 0
