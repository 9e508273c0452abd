"""The estimate of a step's memory, beside the live tensors of the steps that an engine on a GPU measures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.execution.profile.gpu_memory_profile import (
    StepLimits,
    decode_items,
    measure_step_cost,
    prefill_items,
    step_cost,
)
from quire.models.capacity.step_memory import StepSizes, captured_bytes, step_bytes
from quire.models.families import build
from quire.models.modules.decoder import Decoder
from quire.ops import make_ops
from tests.capacity.live_bytes import peak_of
from tests.models.published import CONFIGS

# Small enough to run, and with the proportions of large models: what the first half of a layer has is less than what
# the second one has, so it does not matter that attention by stock operators has more than Triton's kernels.
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
LIMITS = StepLimits(max_num_seqs=4, max_num_batched_tokens=256, max_model_len=128, block_size=16)
# A step of prompts is the largest one, or with a large vocabulary one that draws tokens.
PROMPTS = [
    ("Llama 3.1 8B", {}, torch.bfloat16),
    ("Llama 3.1 8B", {"intermediate_size": 4096}, torch.bfloat16),
    ("Llama 3.1 8B", {"hidden_size": 320, "num_hidden_layers": 4}, torch.float32),
    ("Qwen3 8B", {}, torch.float16),
    ("Gemma 3 4B", {"sliding_window": 32}, torch.bfloat16),
    ("Qwen2.5 7B", {}, torch.bfloat16),
]
DRAWS = [
    ("Llama 3.1 8B", {"vocab_size": 16384}, 0),
    ("Qwen3 8B", {"vocab_size": 20011}, 0),
    ("Llama 3.1 8B", {"vocab_size": 16384}, 3),
]


def make_decoder(name: str, changes: dict[str, Any], dtype: torch.dtype, device: str = "cpu") -> Decoder:
    """Make a decoder of a published shape, scaled down, with random weights."""
    config = CONFIGS[name]
    inner = config.get("text_config")
    config = config | SMALL | changes if inner is None else config | {"text_config": inner | SMALL | changes}
    spec, _ = build(config)
    home = torch.device(device)
    decoder = Decoder(
        spec, ops=make_ops(home, kernels="torch" if device == "cpu" else "auto"), dtype=dtype, device=home
    )
    torch.manual_seed(0)
    for weight, shape in decoder.weights.shapes().items():
        decoder.weights.load(weight, (torch.randn(shape) * 0.05).to(decoder.weights.dtype(weight)))
    return decoder


def sizes_of(limits: StepLimits, dtype: torch.dtype, **others: Any) -> StepSizes:
    return StepSizes(
        limits.max_num_batched_tokens,
        limits.max_num_seqs,
        limits.max_model_len,
        limits.num_draft_tokens,
        dtype.itemsize,
        **others,
    )


@pytest.mark.parametrize(("name", "changes", "dtype"), PROMPTS, ids=str)
def test_prompts(name: str, changes: dict[str, Any], dtype: torch.dtype) -> None:
    decoder = make_decoder(name, changes, dtype)
    measured = peak_of(decoder, LIMITS)(prefill_items(LIMITS))
    estimate = step_bytes(decoder.spec, sizes_of(LIMITS, dtype, has_sort_scratch=False))
    assert estimate == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(("name", "changes", "num_drafts"), DRAWS, ids=str)
def test_draws(name: str, changes: dict[str, Any], num_drafts: int) -> None:
    limits = LIMITS._replace(max_num_seqs=16, num_draft_tokens=num_drafts)
    decoder = make_decoder(name, changes, torch.bfloat16)
    cost = step_cost(limits, peak_of(decoder, limits))
    assert cost.bytes_per_token == 0
    estimate = step_bytes(decoder.spec, sizes_of(limits, torch.bfloat16, has_sort_scratch=False))
    assert estimate == pytest.approx(cost.fixed_bytes, rel=0.03)


def test_drafts_are_rows_as_far_as_the_budget_reaches() -> None:
    limits = LIMITS._replace(max_num_seqs=16)
    for num_drafts, budget, count in ((0, 256, 1), (3, 256, 4), (30, 256, 16), (30, 40, 2), (3, 16, 1)):
        own = limits._replace(num_draft_tokens=num_drafts, max_num_batched_tokens=budget)
        assert decode_items(own, 1000)[0][1] == count
        assert sizes_of(own, torch.bfloat16).num_decode_rows == 16 * count


def test_short_prompts_fill_a_step_as_far_as_seats_reach() -> None:
    for length in (10, 100, 1000):
        own = LIMITS._replace(max_model_len=length)
        assert sizes_of(own, torch.bfloat16).num_prefill_rows == sum(count for _, count in prefill_items(own))


def test_captured_passes_that_make_drafts_keep_tokens_in_place_of_logits() -> None:
    """As `DraftPass` does, and `StepPass` does not."""
    spec, sizes = build(CONFIGS["Llama 3.1 8B"])[0], sizes_of(LIMITS, torch.bfloat16)
    drafts, steps = (captured_bytes(spec, sizes, 8, 100, makes_drafts=each) for each in (True, False))
    logits, tokens = torch.zeros(8, spec.vocab_size), torch.zeros(8, dtype=torch.int64)
    assert steps - drafts == logits.nbytes - tokens.nbytes


@pytest.mark.gpu
def test_a_gpu_takes_about_what_is_estimated() -> None:
    """Products have scratch memory too, of some 32 MiB."""
    limits = StepLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=4096, block_size=16)
    changes = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128, "vocab_size": 65536}
    decoder = make_decoder("Llama 3.1 8B", changes, torch.bfloat16, "cuda")
    cost = measure_step_cost(decoder, limits, torch.bfloat16)
    assert step_bytes(decoder.spec, sizes_of(limits, torch.bfloat16)) == pytest.approx(cost.fixed_bytes, rel=0.15)
