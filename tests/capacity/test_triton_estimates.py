"""The estimates of a step's memory and of rounded weights, beside the tensors of Triton's backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config import Quantization
from quire.execution.profile.gpu_memory_profile import StepLimits, prefill_items
from quire.models.capacity.step_memory import StepSizes, captured_bytes, step_bytes
from quire.models.families import build
from quire.models.modules.decoder import Decoder
from quire.models.specs.parameter_estimate import estimate_parameters, triton_bytes
from quire.ops.interface.ops import Activation, Linear
from quire.ops.interface.quantized_weight import StoredWeight
from quire.ops.layers.gated import GatedLinear
from tests.capacity.live_bytes import LiveBytes, peak_of
from tests.models.tiny import make_tiny
from tests.ops.triton.device import INTERPRETED_MARKS

from quire.ops.triton.linear.stored_linear import TritonQuantizedLinear  # isort: skip - that skips where Triton is missing
from quire.ops.triton.triton_ops import TritonOps  # isort: skip

pytestmark = INTERPRETED_MARKS
CPU = torch.device("cpu")
# Rows fill the chunks of recurrences.
LIMITS = StepLimits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=128, block_size=16)
# Dense layers, norms behind them, gates, experts of several kinds, and each recurrence.
FAMILIES = (
    "llama",
    "gemma3-options",
    "gemma4-moe",
    "gpt-oss",
    "llama4",
    "lfm2-moe",
    "granite4",
    "falcon-h1-options",
    "qwen3.5",
    "qwen3.5-moe",
)
# Sizes with which inputs are not divided among programs, which large layers do not need.
ROUNDED: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class CountingOps(TritonOps):
    """Triton's backend, which counts the bytes of packed weights."""

    num_bytes = 0

    def pack_linear(
        self,
        weight: Tensor | StoredWeight,
        bias: Tensor | None = None,
        min_bits: int = 4,
        gate: Activation | None = None,
        num_slices: int = 1,  # noqa: ARG002 (no order of sums is promised)
        max_group: int = 32,
    ) -> Linear:
        packed = super().pack_linear(weight, bias, min_bits, gate, max_group=max_group)
        linear: Any = packed.linear if isinstance(packed, GatedLinear) else packed
        parts = linear.parts if isinstance(linear, TritonQuantizedLinear) else ()
        assert all(part.mins is None and part.zero_points is None for part in parts)
        self.num_bytes += sum(part.codes.nbytes + part.scales.nbytes for part in parts) or linear.weight.nbytes
        return packed


def make_decoder(config: dict[str, Any], quantization: Quantization | None) -> tuple[Decoder, CountingOps]:
    """Make a decoder with random weights, and its backend."""
    ops = CountingOps(CPU, quantization)
    spec, _ = build(config)
    decoder = Decoder(spec, ops=ops, dtype=torch.bfloat16, device=CPU)
    torch.manual_seed(0)
    for weight, shape in decoder.weights.shapes().items():
        decoder.weights.load(weight, (torch.randn(shape) * 0.05).to(decoder.weights.dtype(weight)))
    return decoder, ops


def assert_estimated(config: dict[str, Any], quantization: Quantization | None = None) -> None:
    decoder, _ = make_decoder(config, quantization)
    sizes = StepSizes(64, 2, 128, is_rounded=quantization is not None, has_sort_scratch=False)
    measured = peak_of(decoder, LIMITS, collects=True)(prefill_items(LIMITS))
    assert step_bytes(decoder.spec, sizes) == pytest.approx(measured, rel=0.04)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    assert_estimated(make_tiny(name).config)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_steps_with_rounded_weights(quantization: Quantization) -> None:
    assert_estimated(make_tiny("qwen3").config | ROUNDED, quantization)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_heads_that_are_rounded(quantization: Quantization) -> None:
    """They take rows of float32 and give logits of it; a captured step keeps hidden states and logits besides."""
    decoder, _ = make_decoder(make_tiny("qwen3").config | ROUNDED | {"vocab_size": 8192}, quantization)
    spec, num_rows, live = decoder.spec, 8, LiveBytes(collects=True)
    hidden = torch.randn(num_rows, spec.width).to(torch.bfloat16)
    with torch.inference_mode(), live:
        logits = decoder.logits(hidden)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())
    estimate = captured_bytes(spec, StepSizes(64, 8, 128, is_rounded=True), num_rows, 0)
    assert estimate == pytest.approx(live.peak + 2 * hidden.nbytes + logits.nbytes, rel=0.01)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_of_rounded_weights(name: str, quantization: Quantization) -> None:
    """Whole groups and others, odd numbers of them, and what is kept as it is."""
    decoder, ops = make_decoder(make_tiny(name).config, quantization)
    tables = estimate_parameters(decoder.spec).tables
    assert triton_bytes(decoder.spec, 2, quantization) == 2 * tables + ops.num_bytes
