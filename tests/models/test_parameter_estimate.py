"""The estimate of parameters, beside published counts and beside a model that is there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config import Quantization
from quire.models.checkpoints.checkpoint import read_config
from quire.models.families import build
from quire.models.families.quantization_config import without_quantization
from quire.models.modules.decoder import Decoder
from quire.models.specs.parameter_estimate import Matrix, estimate_parameters, triton_bytes
from quire.ops.interface.ops import Activation, Linear
from quire.ops.interface.quantized_weight import QuantizedWeight, StoredWeight
from quire.ops.interface.weight_formats import weight_format
from quire.ops.pytorch.rounded_weights import round_weight
from quire.ops.pytorch.torch_ops import TorchOps
from tests.models.published import CONFIGS
from tests.models.tiny import CASES, make_tiny

CPU = torch.device("cpu")
BILLION = 10**9
PUBLISHED = {
    "Llama 2 7B": 6.74,
    "Llama 3.1 8B": 8.03,
    "Llama 3.1 70B": 70.6,
    "Qwen2.5 7B": 7.62,
    "Qwen3 0.6B": 0.596,
    "Qwen3 8B": 8.19,
    "Qwen3 32B": 32.8,
    "Mistral 7B v0.1": 7.24,
    "Gemma 3 4B": 3.88,
    "Gemma 3 27B": 27.0,
    "Gemma 4 31B": 30.7,
    "Gemma 4 26B A4B": 25.2,
    "Llama 4 Scout": 107.8,
    "Mixtral 8x7B": 46.7,
    "Qwen3 30B A3B": 30.5,
    "LFM2 1.2B": 1.17,
    "LFM2 8B A1B": 8.34,
    "Granite 4.0 H-350M": 0.34,
    "Granite 4.0 H-Tiny": 6.94,
    "Falcon-H1 0.5B": 0.521,
    "Qwen3.5 35B A3B": 34.7,
    "Granite 3.3 8B": 8.17,
    "SmolLM3 3B": 3.08,
    "Seed-OSS 36B": 36.2,
    "Ministral 3 8B": 8.5,
    "GLM-4.5 Air": 106.8,
    "OLMo 3 7B": 7.3,
    "MiniMax M2": 228.7,
    "Qwen3-Next 80B A3B": 79.7,
    "Bamba 9B": 9.78,
    "Nemotron Nano 9B v2": 8.89,
    "Nemotron 3 Nano 30B A3B": 31.6,
    "Phi-3.5 mini": 3.82,
    "Phi-4 mini": 3.84,
    "gpt-oss 20B": 20.9,
}


def num_parameters(config: Mapping[str, Any]) -> int:
    return estimate_parameters(build(without_quantization(config))[0]).total


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    assert num_parameters(CONFIGS[name]) == pytest.approx(PUBLISHED[name] * BILLION, rel=0.02)


@pytest.mark.parametrize("name", CASES)
def test_families(name: str) -> None:
    tiny = make_tiny(name)
    shapes = tiny.decoder.weights.shapes()
    # All experts of a layer may be one tensor. What else has three dimensions are the taps of convolutions.
    matrices = [shape for name, shape in shapes.items() if len(shape) == 2 or (len(shape) == 3 and ".ffn." in name)]
    assert num_parameters(tiny.config) == sum(map(math.prod, matrices))


def test_the_bundled_model() -> None:
    assert 3_400_000 < num_parameters(read_config("bundled")) < 3_600_000


def test_bytes_of_rounded_weights() -> None:
    """What is looked up stays; a head is there by itself; a sixteenth of a byte is for scales, an eighth in down."""
    tied = estimate_parameters(build(CONFIGS["Qwen3 0.6B"])[0])
    table, others = 151936 * 1024, tied.total - 151936 * 1024
    assert tied.num_bytes(2, None) == 2 * tied.total
    downs = 28 * 1024 * 3072
    assert tied.num_bytes(2, "int8") == 2 * table + table * 17 // 16 + others * 17 // 16 + downs // 16
    assert tied.num_bytes(2, "int4") == 2 * table + table * 13 // 16 + others * 9 // 16
    spec, _ = build(without_quantization(CONFIGS["gpt-oss 20B"]))
    stored, num_experts = estimate_parameters(spec), 24 * 32 * 3 * 2880**2
    assert stored.num_bytes(2, None, is_mxfp4=True) == 2 * (stored.total - num_experts) + num_experts * 9 // 16
    free = estimate_parameters(build(CONFIGS["Llama 3.1 8B"])[0])
    table = 128256 * 4096
    downs = 32 * 4096 * 14336
    assert free.num_bytes(2, "int8") == 2 * table + (free.total - table) * 17 // 16 + downs // 16
    mixture, downs = estimate_parameters(build(CONFIGS["Mixtral 8x7B"])[0]), 32 * 8 * 4096 * 14336
    table = 32000 * 4096
    assert mixture.num_bytes(2, "int8") == 2 * table + (mixture.total - table) * 17 // 16 + downs // 16


def kept_bytes(weight: QuantizedWeight) -> int:
    """Return the bytes of codes and scales; groups of four bits are kept in pairs, an odd one with zeros."""
    codes, scales, *_ = weight.read(slice(None))
    is_paired = weight.form.bits == 4
    num_kept = scales.shape[1] + (scales.shape[1] % 2 if is_paired else 0)
    return (codes.nbytes // (2 if is_paired else 1) + scales.nbytes) * num_kept // scales.shape[1]


class CountedWeights(TorchOps):
    """Stock operators; counts the bytes of weights as Triton's backend rounds them, which needs no Triton."""

    def __init__(self, quantization: Quantization) -> None:
        super().__init__(CPU)
        self._rounding, self.num_bytes = quantization, 0

    def pack_linear(
        self,
        weight: Tensor | StoredWeight,
        bias: Tensor | None = None,
        min_bits: int = 4,
        gate: Activation | None = None,
        num_slices: int = 1,  # noqa: ARG002 (no order of sums is promised)
        max_group: int = 32,
    ) -> Linear:
        if gate is None:  # else this is called again, without it
            assert isinstance(weight, Tensor)
            chosen = weight_format(self._rounding, min_bits, max_group)
            assert chosen is not None
            self.num_bytes += kept_bytes(round_weight(weight, chosen, CPU).quantized[0])
        return super().pack_linear(weight, bias, min_bits, gate)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(
    "name", ["llama", "llama3-rope", "qwen3-moe", "gemma4", "lfm2", "falcon-h1", "granite4", "qwen3.5", "qwen3.5-moe"]
)
def test_bytes_of_weights_that_triton_rounds(name: str, quantization: Quantization) -> None:
    spec, _ = build(make_tiny(name).config)
    ops = CountedWeights(quantization)
    decoder = Decoder(spec, ops=ops, dtype=torch.bfloat16, device=CPU)
    for weight, shape in decoder.weights.shapes().items():
        decoder.weights.load(weight, torch.ones(shape, dtype=decoder.weights.dtype(weight)))
    counts = estimate_parameters(spec)
    assert triton_bytes(spec, 2, quantization) == 2 * counts.tables + ops.num_bytes


def test_bytes_of_rows_that_triton_rounds() -> None:
    """Whole groups, of which the last may be padded; pairs of groups of four bits."""
    found = {
        (width, min_bits): [Matrix(10, width, min_bits).triton_bytes(2, form) // 10 for form in ("int8", "int4")]
        for width, min_bits in ((256, 4), (96, 4), (48, 4), (24, 4), (256, 6), (96, 6), (256, 8))
    }
    assert found == {
        (256, 4): [256 + 8 * 2, 128 + 8 * 2],
        (96, 4): [96 + 3 * 2, 64 + 4 * 2],
        (48, 4): [64 + 2 * 2, 32 + 2 * 2],
        (24, 4): [32 + 2, 32 + 2 * 2],
        (256, 6): [256 + 8 * 2, 256 + 8 * 2],
        (96, 6): [96 + 3 * 2, 96 + 3 * 2],
        (256, 8): [256 + 8 * 2, 256 + 8 * 2],
    }
    assert Matrix(10, 24).triton_bytes(2, None) == 480


def test_mxfp4_experts_stay_beside_rounded_weights() -> None:
    spec, _ = build(without_quantization(CONFIGS["gpt-oss 20B"]))
    experts = estimate_parameters(spec).experts
    plain = triton_bytes(spec, 2, None, is_mxfp4=True)
    rounded = triton_bytes(spec, 2, "int8", is_mxfp4=True)
    assert plain == estimate_parameters(spec).num_bytes(2, None, is_mxfp4=True)
    assert experts * 9 // 16 < rounded < plain
