"""Asynchronous scheduling on each kind of cache: the tokens of transformers, and of the engine step by step."""

from __future__ import annotations

from typing import Any

import pytest

from quire import SamplingParams
from tests.conformance.checkpoints import NEW_TOKENS
from tests.conformance.conftest import Reference
from tests.conformance.test_histories import has_states, load, outputs_of


@pytest.fixture
def reference(core_reference: Reference) -> Reference:
    """Return the reference of one of the kinds of cache."""
    return core_reference


def test_greedy_tokens_in_any_company(reference: Reference) -> None:
    """In chunks, from the cache, and with a snapshot of states at every second block."""
    llm = load(reference, max_num_seqs=3, max_num_batched_tokens=16, async_scheduling=True, state_snapshot_interval=16)
    assert llm.engine.scheduler.plans_ahead
    for _ in range(2):
        assert outputs_of(llm, reference.prompts) == reference.outputs


@pytest.mark.parametrize("mode", ["swap", pytest.param("recompute", marks=pytest.mark.slow)])
def test_preempted(reference: Reference, mode: str) -> None:
    options: dict[str, Any] = {"num_kv_blocks": 12, "max_model_len": 96, "preemption_mode": mode}
    llm = load(reference, **options, swap_space=8 << 20 if mode == "swap" else 0, async_scheduling=True)
    assert outputs_of(llm, reference.prompts * 2) == reference.outputs * 2
    # A pool that holds the longest sequence with its states has room for all of these.
    assert has_states(llm) or llm.stats.num_preemptions > 0
    assert llm.stats.num_swaps == (llm.stats.num_preemptions if mode == "swap" else 0)


def test_seeded_tokens_and_what_is_told_of_them(reference: Reference) -> None:
    """Samples with penalties, log probabilities, reasons of ends, and cached tokens, in two rounds."""
    penalties: dict[str, Any] = {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=NEW_TOKENS, n=2, logprobs=2, **penalties)

    def found(is_async: bool) -> list[Any]:
        llm = load(reference, async_scheduling=is_async)
        outputs = [each for _ in range(2) for each in llm.generate(reference.prompts, params, use_tqdm=False)]
        stats = llm.stats
        counts = (stats.prompt_tokens, stats.generation_tokens, stats.computed_tokens)
        return [
            counts,
            *(
                (
                    output.num_cached_tokens,
                    [(one.token_ids, one.finish_reason, one.stop_reason) for one in output.outputs],
                    [pytest.approx(one.cumulative_logprob, abs=1e-4) for one in output.outputs],
                )
                for output in outputs
            ),
        ]

    assert found(True) == found(False)
