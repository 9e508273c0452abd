"""Cosines and sines of rotary position embedding for a step, and scales of queries by position."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.models.specs.frequencies import inverse_frequencies
from quire.models.specs.rotations import Rope, Sections, Temperature
from quire.ops.interface.ops import Rotation


class RotaryEmbedding:
    """Cosines and sines of one kind of rotation.

    They are computed from the positions of each step, once for all layers: for a step's few rows this is as cheap
    as a gather from a table, and a table for 128k positions would take 64 MiB.
    """

    def __init__(
        self,
        rope: Rope | None,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        sections: Sections | None = None,
    ) -> None:
        frequencies, self._scale = torch.zeros(head_dim // 2), torch.ones(head_dim, device=device)
        if rope is not None:
            turning, scale = inverse_frequencies(rope, rope.num_turned or head_dim)
            frequencies[: len(turning)] = turning
            self._scale.view(2, -1)[:, : len(turning)] = scale
        self._frequencies = torch.cat((frequencies, frequencies)).to(device)
        self._dtype = dtype
        self._half = head_dim // 2
        axes = [0] * self._half if sections is None else sections.axes(self._half)
        self._axes = torch.tensor(axes * 2, device=device)

    def __call__(self, positions: Tensor) -> Rotation:
        """Return cosines and sines of positions [T], or [3, T] by time, row and column."""
        by_row = positions.to(torch.float32)
        by_frequency = by_row[:, None] if by_row.ndim == 1 else by_row.T[:, self._axes]
        angles = by_frequency[:, None] * self._frequencies
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        sin[..., : self._half].neg_()
        return Rotation(cos.to(self._dtype), sin.to(self._dtype))


def query_scales(temperature: Temperature, positions: Tensor) -> Tensor:
    """Return the factors of the queries of a step's rows, [T, 1, 1] of float32."""
    intervals = ((positions.to(torch.float32) + temperature.offset) / temperature.interval).floor_()
    return intervals.log1p_().mul_(temperature.weight).add_(1.0).view(-1, 1, 1)
