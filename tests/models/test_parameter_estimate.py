"""The estimate of parameters, beside published counts and beside a model that is there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from quire.models.checkpoint import read_config
from quire.models.families import build
from quire.models.parameter_estimate import estimate_parameters
from quire.models.quantization_config import without_quantization
from tests.models.published import CONFIGS
from tests.models.tiny import CASES, make_tiny

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
    """What is looked up stays; a head is there by itself; four bits and six have a sixteenth of a byte for scales."""
    tied = estimate_parameters(build(CONFIGS["Qwen3 0.6B"])[0])
    table, others = 151936 * 1024, tied.total - 151936 * 1024
    assert tied.num_bytes(2, None) == 2 * tied.total
    assert tied.num_bytes(2, "int8") == 3 * table + others
    assert tied.num_bytes(2, "int4") == 2 * table + table * 13 // 16 + others * 9 // 16
    spec, _ = build(without_quantization(CONFIGS["gpt-oss 20B"]))
    stored, num_experts = estimate_parameters(spec), 24 * 32 * 3 * 2880**2
    assert stored.num_bytes(2, None, is_mxfp4=True) == 2 * (stored.total - num_experts) + num_experts * 9 // 16
    free = estimate_parameters(build(CONFIGS["Llama 3.1 8B"])[0])
    table = 128256 * 4096
    assert free.num_bytes(2, "int8") == 2 * table + table + free.total - 2 * table
