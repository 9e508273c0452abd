"""The frequencies of rotary position embedding, scaled for contexts beyond the original length."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.models.specs.rotations import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    """Return the D/2 angles per position, float32, and the factor of cosine and sine."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case None:
            return frequencies, 1.0
        case LinearScaling(factor):
            return frequencies / factor, 1.0
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling), 1.0
        case YarnScaling():
            return _yarn(frequencies, rope.theta, head_dim, rope.scaling), rope.scaling.attention_factor
        case ProportionalScaling(fraction, factor):
            frequencies[int(fraction * head_dim // 2) :] = 0.0
            return frequencies / factor, 1.0
        case LongRopeScaling():
            factors = rope.scaling.long_factors if rope.scaling.is_long else rope.scaling.short_factors
            return 1.0 / (torch.tensor(factors) * rope.theta**exponents), rope.scaling.attention_factor


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = frequencies * (scaling.original_max_position / (2 * math.pi))  # full turns within the original context
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1.0 - smooth) * (frequencies / scaling.factor) + smooth * frequencies


def _yarn(frequencies: Tensor, theta: float, head_dim: int, scaling: YarnScaling) -> Tensor:
    def index_of(turns: float) -> float:
        """The (fractional) frequency that makes this many turns within the original context."""
        return head_dim * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * interpolated + frequencies * (1.0 - interpolated)
