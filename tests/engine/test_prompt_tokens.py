"""The counter of prompt tokens grows by what steps compute or find cached, each token of a prompt once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM
from quire.engine.exporters.prometheus import Metrics
from quire.sequences.params import SamplingParams
from tests.engine.test_llm import greedy, load
from tests.engine.test_metrics import samples

CHUNK = 32
PROMPT = [7 + idx % 50 for idx in range(100)]


@pytest.fixture
def llm() -> Iterator[LLM]:
    with load(max_num_batched_tokens=CHUNK, max_num_seqs=8) as llm:
        yield llm


def counts(llm: LLM) -> list[int]:
    """Return the counter after each step, until all requests have ended."""
    seen = []
    while llm.engine.has_unfinished:
        llm.engine.step()
        seen.append(llm.stats.prompt_tokens)
    return seen


def test_a_prompt_counts_as_it_is_computed_and_cached_tokens_with_the_first_step(llm: LLM) -> None:
    llm.engine.add_request("first", PROMPT, greedy(1))
    assert counts(llm) == [32, 64, 96, 100] == [*range(32, 97, 32), llm.stats.computed_tokens]
    llm.engine.add_request("second", PROMPT[:64] + PROMPT, greedy(1))
    # 64 tokens are cached, and a step computes 32 of the other 100.
    assert counts(llm) == [100 + 64 + num for num in (32, 64, 96, 100)]


def test_a_request_that_is_aborted_in_its_prompt_counts_what_was_computed(llm: LLM) -> None:
    metrics = Metrics("tiny")
    llm.engine.add_request("left", PROMPT, greedy(1))
    for _ in range(2):
        llm.engine.step()
        metrics.on_step(llm.engine.measure())
    output = llm.engine.abort_request("left")
    assert output is not None
    metrics.on_outputs([output])
    llm.engine.add_request("waits", PROMPT, greedy(1))
    llm.engine.abort_request("waits")
    assert (llm.stats.prompt_tokens, llm.stats.computed_tokens) == (64, 64)
    values = samples(metrics)
    computed = {name: values[f"vllm:{name}_sum"] for name in ("request_prefill_kv_computed_tokens",)}
    assert (computed, values["vllm:prompt_tokens_total"]) == ({"request_prefill_kv_computed_tokens": 64}, 64)


@pytest.mark.parametrize(
    "options", [{"n": 3}, {"n": 2, "best_of": 3}, {"n": 2, "beam_width": 3}, {"prompt_logprobs": 1}]
)
def test_samples_and_beams_count_their_prompt_once(llm: LLM, options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True, **options)
    llm.engine.add_request("it", PROMPT, params)
    assert counts(llm)[-1] == len(PROMPT)


@pytest.mark.parametrize(
    "options", [{"preemption_mode": "recompute"}, {"swap_space": 1 << 22, "preemption_mode": "swap"}]
)
def test_what_is_computed_again_after_a_preemption_counts_no_second_time(options: dict[str, Any]) -> None:
    with load(num_kv_blocks=40, **options) as llm:
        prompts = [list(range(10 + start, 80 + start)) for start in range(12)]
        for idx, prompt in enumerate(prompts):
            llm.engine.add_request(str(idx), prompt, greedy(40, ignore_eos=True, n=2))
        seen = counts(llm)
        assert seen == sorted(seen)
        assert seen[-1] == sum(map(len, prompts))
        assert llm.stats.num_preemptions > 0
