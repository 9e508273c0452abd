"""Profiling steps; on a GPU, the memory that they take is what the pool must leave free."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config import StepCost
from quire.execution.profile.gpu_memory_profile import (
    CONTEXTS,
    Items,
    StepLimits,
    decode_items,
    measure_step_cost,
    plan_of,
    prefill_items,
    step_cost,
)
from quire.execution.runners.build import build_runner
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.loading.loading import load_decoder
from tests.execution.test_runner import Tiny, tiny_qwen3

LIMITS = StepLimits(max_num_seqs=4, max_num_batched_tokens=50, max_model_len=32, block_size=4)


def test_prompts_fill_the_step_and_are_as_long_as_they_can_be() -> None:
    assert prefill_items(LIMITS) == [(0, 32), (0, 18)]
    assert prefill_items(LIMITS._replace(max_num_seqs=1)) == [(0, 32)]
    assert prefill_items(LIMITS._replace(max_model_len=100)) == [(0, 50)]


def test_decodes_have_the_tokens_asked_for_as_far_as_sequences_reach() -> None:
    assert decode_items(LIMITS, 40) == [(10, 1)] * 4
    assert decode_items(LIMITS, 1000) == [(31, 1)] * 4
    assert decode_items(LIMITS, 1) == [(1, 1)] * 4


def test_decodes_have_drafts_as_far_as_the_budget_reaches() -> None:
    assert decode_items(LIMITS._replace(num_draft_tokens=3), 40) == [(10, 4)] * 4
    assert decode_items(LIMITS._replace(num_draft_tokens=30), 40) == [(10, 12)] * 4
    assert decode_items(LIMITS._replace(num_draft_tokens=3), 1000) == [(28, 4)] * 4
    assert decode_items(LIMITS._replace(num_draft_tokens=3, max_num_seqs=50), 100) == [(2, 1)] * 50


@pytest.mark.parametrize(("fixed", "slope"), [(10_000, 7), (10_000, 0), (0, 3)])
def test_the_cost_is_split_into_its_two_parts(fixed: int, slope: int) -> None:
    limits = LIMITS._replace(max_model_len=1 << 20)

    def peak_bytes(items: Items) -> int:
        return fixed + slope * sum(start + count for start, count in items)

    cost = step_cost(limits, peak_bytes)
    assert cost.bytes_per_token == slope
    assert cost.fixed_bytes == max(fixed, peak_bytes(prefill_items(limits)))


def test_short_sequences_leave_no_slope_to_be_seen() -> None:
    assert sum(CONTEXTS) > 4 * LIMITS.max_model_len
    assert step_cost(LIMITS, lambda items: 1000 * len(items)) == StepCost(fixed_bytes=4000, bytes_per_token=0)


@pytest.mark.parametrize(
    "items",
    [prefill_items(LIMITS), decode_items(LIMITS, 60), decode_items(LIMITS._replace(num_draft_tokens=3), 60)],
)
def test_the_steps_run(items: Items, tmp_path: Path) -> None:
    decoder = Tiny(tiny_qwen3, tmp_path).decoder
    groups = decoder.cache_groups
    runner = build_runner(decoder, num_blocks=[2] * len(groups), block_size=4, device="cpu", dtype=torch.float32)
    for storage in runner._storages:
        storage.data.zero_()  # nobody wrote what the steps read: it could be NaN
    result = runner.execute(plan_of(items, LIMITS, len(groups)))
    for item, (start, count) in zip(result.items, items, strict=True):
        assert 1 <= len(item.token_ids) <= (count if start else 1)


@pytest.mark.gpu
def test_a_gpu_is_filled_as_far_as_asked_and_no_further(tmp_path: Path) -> None:
    folder = str(tmp_path)
    Tiny(tiny_qwen3, tmp_path)
    decoder = load_decoder(Checkpoint.open(folder), device="cuda", dtype=torch.float32)
    assert measure_step_cost(decoder, LIMITS, torch.float32).fixed_bytes > 0
    del decoder
    llm = LLM(folder, device="cuda", skip_tokenizer_init=True, gpu_memory_utilization=0.5, max_num_seqs=256)
    llm.generate([[1, 2, 3]] * 256, SamplingParams(max_tokens=16), use_tqdm=False)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    assert total_bytes - free_bytes <= 0.55 * total_bytes
