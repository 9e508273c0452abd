"""The frequencies of rotary position embedding, and their cosines and sines for a step."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.models.rotations import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    Temperature,
    YarnScaling,
)
from quire.ops.interface import Rotation


class RotaryEmbedding:
    """Cosines and sines of one kind of rotation.

    They are computed from the positions of each step, once for all layers: for a step's few rows this is as cheap
    as a gather from a table, and a table for 128k positions would take 64 MiB.

    Args:
        rope: the rotation; None for angles of 0, which leave everything as it is.
        head_dim: D.
        dtype: dtype of the model; angles are always float32.
    """

    def __init__(self, rope: Rope | None, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        frequencies, self._scale = torch.zeros(head_dim // 2), torch.ones(head_dim, device=device)
        if rope is not None:
            turning, scale = inverse_frequencies(rope, rope.num_turned or head_dim)
            frequencies[: len(turning)] = turning
            self._scale.view(2, -1)[:, : len(turning)] = scale
        self._frequencies = torch.cat((frequencies, frequencies)).to(device)
        self._dtype = dtype
        self._half = head_dim // 2

    def __call__(self, positions: Tensor) -> Rotation:
        """Return cosines and sines.

        Args:
            positions: [T] of int64.
        """
        angles = positions.to(torch.float32)[:, None, None] * self._frequencies
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        sin[..., : self._half].neg_()
        return Rotation(cos.to(self._dtype), sin.to(self._dtype))


def query_scales(temperature: Temperature, positions: Tensor) -> Tensor:
    """Return what the queries of a step's rows are multiplied by, [T, 1, 1] of float32.

    Args:
        positions: [T] of int64.
    """
    intervals = ((positions.to(torch.float32) + 1.0) / temperature.interval).floor_()
    return intervals.log1p_().mul_(temperature.weight).add_(1.0).view(-1, 1, 1)


def turning_order(rope: Rope | None, head_dim: int) -> Tensor | None:
    """Return the order in which a head's values lie where not just its halves turn; None for their own order.

    Kernels turn the halves of whole heads against each other. Scores and norms see no difference, as long as queries
    and keys lie alike. Where only a first part of a head turns:

    ```
     a head     | turns, half 0 | turns, half 1 | stays, half 0 | stays, half 1 |
     its order  | turns, half 0 | stays, half 0 | turns, half 1 | stays, half 1 |
    ```

    Where neighbours turn against each other, half 0 is every second value of the part, half 1 those between.

    Returns:
        [D] of int64.
    """
    if rope is None or (rope.num_turned is None and not rope.interleaved):
        return None
    turns, stays = torch.arange(head_dim).tensor_split((rope.num_turned or head_dim,))
    halves = turns.view(-1, 2).T if rope.interleaved else turns.view(2, -1)
    return torch.cat((halves, stays.view(2, -1)), 1).flatten()


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
