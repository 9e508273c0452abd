"""Greedy tokens of two ranks equal those of transformers: cold, again, chunked, preempted and swapped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.errors import ConfigError
from tests.conformance.checkpoints import (
    EOS_TOKEN_ID,
    UNSHARED,
    generate_with_transformers,
    ragged_prompts,
    save_checkpoint,
)
from tests.conformance.conftest import NAMES, Reference, slow_or_exhaustive
from tests.conformance.test_draft_model import noisy_copy, with_model
from tests.conformance.test_histories import load, outputs_of
from tests.distributed.engines import compare_every_step
from tests.distributed.in_threads import native_library
from tests.models.mtp import save_mtp_checkpoint

# Four ranks would divide groups of recurrent heads, each of which is normed whole.
MORE_RANKS_THAN_GROUPS = frozenset({"granite4", "granite4-moe", "falcon-h1-norm"})
# Two blocks of states for each sequence: the smallest pool that is accepted has 20.
SMALLEST_POOL = {"falcon-h1": 20}
# Windows and states: three sequences that are computed in small chunks fit into the smallest pool.
FIT_IN_CHUNKS = MORE_RANKS_THAN_GROUPS | {
    *("falcon-h1", "gemma3", "gemma4", "lfm2-moe", "mistral-window", "qwen3.5", "qwen3.5-moe")
}
# Families that ranks can share.
SHARED = [name for name in NAMES if name not in UNSHARED]

# Those with asynchronous scheduling that CI runs.
AHEAD = frozenset({"gpt-oss", "llama3", "qwen3.5"})


# Processes take seconds to start. The default run has two ranks beside one process in `tests/engine/test_ranks.py`.
@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_or_exhaustive(name)) for name in SHARED])
def test_two_ranks_under_every_history(name: str, references: Callable[[str], Reference]) -> None:
    native_library()
    reference = references(name)
    short = {"num_kv_blocks": SMALLEST_POOL.get(name, 12), "max_model_len": 96}
    histories: list[dict[str, Any]] = [
        {},
        {**short, "swap_space": 8 << 20, "preemption_mode": "swap"},
        {**({} if name in FIT_IN_CHUNKS else short), "max_num_seqs": 3, "max_num_batched_tokens": 5},
    ]
    for options in histories:
        with load(reference, tensor_parallel_size=2, **options) as llm:
            compare_every_step(llm)
            assert outputs_of(llm, reference.prompts) == reference.outputs
            # Again: from cached prefixes, where those were not evicted.
            assert outputs_of(llm, reference.prompts) == reference.outputs
            if "num_kv_blocks" in options:
                assert llm.stats.num_preemptions > 0
            if "swap_space" in options:
                assert llm.stats.num_swaps > 0


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_or_exhaustive(name, AHEAD)) for name in SHARED])
def test_two_ranks_that_run_ahead(name: str, references: Callable[[str], Reference]) -> None:
    native_library()
    reference = references(name)
    short = {"num_kv_blocks": SMALLEST_POOL.get(name, 12), "max_model_len": 96}
    for options in ({"max_num_seqs": 3, "max_num_batched_tokens": 16}, {**short, "swap_space": 8 << 20}):
        with load(reference, tensor_parallel_size=2, async_scheduling=True, **options) as llm:
            compare_every_step(llm)
            for _ in range(2):
                assert outputs_of(llm, reference.prompts) == reference.outputs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama2", "qwen3"])
def test_four_ranks(name: str, references: Callable[[str], Reference]) -> None:
    native_library()
    reference = references(name)
    with load(reference, tensor_parallel_size=4) as llm:
        assert outputs_of(llm, reference.prompts) == reference.outputs


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MORE_RANKS_THAN_GROUPS))
def test_heads_that_are_normed_together_are_refused(name: str, references: Callable[[str], Reference]) -> None:
    with pytest.raises(ConfigError, match="each of which is normed whole") as refused:
        load(references(name), tensor_parallel_size=4)
    assert refused.value.field == "tensor_parallel_size"


EXPERTS = ("gpt-oss", "qwen3.5-moe", "llama4", "gemma4-moe", "granite4-moe", "lfm2-moe")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS)
def test_ranks_with_whole_experts(name: str, references: Callable[[str], Reference]) -> None:
    native_library()
    reference = references(name)
    for options in ({}, {"max_num_seqs": 3, "max_num_batched_tokens": 5}):
        with load(reference, tensor_parallel_size=2, enable_expert_parallel=True, **options) as llm:
            compare_every_step(llm)
            assert outputs_of(llm, reference.prompts) == reference.outputs
            assert outputs_of(llm, reference.prompts) == reference.outputs


def drafts_of(llm: LLM, reference: Reference) -> tuple[int, int]:
    """Check that drafts change no output, twice; return the numbers of drafts and of accepted ones."""
    if llm.engine.ranks is not None:
        compare_every_step(llm)
    for _ in range(2):
        assert outputs_of(llm, reference.prompts) == reference.outputs
    return llm.stats.num_draft_tokens, llm.stats.num_accepted_tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen3.5"])
def test_a_draft_model_that_is_divided(name: str, references: Callable[[str], Reference], tmp_path: Path) -> None:
    native_library()
    reference, draft = references(name), noisy_copy(references(name).folder, tmp_path)
    with with_model(reference, draft) as one, with_model(reference, draft, tensor_parallel_size=2) as two:
        expected = drafts_of(one, reference)
        assert drafts_of(two, reference) == expected
        assert 0 < expected[1] < expected[0]
    scarce = {"num_kv_blocks": 24, "max_model_len": 96, "swap_space": 8 << 20, "max_num_batched_tokens": 9}
    with with_model(reference, draft, tensor_parallel_size=2, max_num_seqs=8, **scarce) as two:
        drafts_of(two, reference)


@pytest.mark.slow
def test_a_draft_model_that_every_rank_has_as_a_whole(references: Callable[[str], Reference], tmp_path: Path) -> None:
    """Three heads are not divided among two ranks."""
    native_library()
    reference = references("llama3")
    draft = save_checkpoint("llama3", tmp_path, hidden_size=96, num_attention_heads=3, num_key_value_heads=3)
    with with_model(reference, draft) as one, with_model(reference, draft, tensor_parallel_size=2) as two:
        expected = drafts_of(one, reference)
        assert drafts_of(two, reference) == expected
        assert expected[0] > 0


@pytest.mark.slow
def test_the_head_for_multi_token_prediction(tmp_path: Path) -> None:
    native_library()
    folder, prompts = save_mtp_checkpoint(tmp_path, noise=0.07, head_noise=0.5), ragged_prompts()
    reference = Reference(folder, prompts, generate_with_transformers(folder, prompts, [EOS_TOKEN_ID]), 4)
    options: dict[str, Any] = {"speculative_method": "mtp", "num_speculative_tokens": 4}
    found = []
    for size in (1, 2):
        with load(reference, **options, tensor_parallel_size=size) as llm:
            llm.engine.step_recorder.speculation = None
            speculation: Any = llm.engine.scheduler.drafter
            speculation.step_costs = [1.0] * 5
            found.append(drafts_of(llm, reference))
    assert found[0] == found[1]
    assert 0 < found[0][1] < found[0][0]
