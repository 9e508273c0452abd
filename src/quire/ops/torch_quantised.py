"""Linear layers with weights quantised while loading, by stock torch operators: less memory, but not faster."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.weight_formats import BITS, GROUP, SMALLEST, WeightFormat

# Number of weights that are widened at a time, so that they stay in the CPU cache.
CHUNK = 1 << 20


class TorchQuantisedLinear:
    """A matmul of int8 activations and weights of few bits, which are widened a chunk of columns at a time."""

    __slots__ = ("_bias", "_num_columns", "_scales", "_values", "_width")

    def __init__(self, format_name: WeightFormat, weight: Tensor, bias: Tensor | None) -> None:
        self._num_columns, self._width = weight.shape
        self._bias = bias
        bits = BITS[format_name]
        parts = (weight[part].float() for part in self._parts())
        chunks = [round_rows(part) if bits == 8 else round_groups(part, bits) for part in parts]
        values, scales = map(torch.cat, zip(*chunks, strict=True))
        self._values, self._scales = (_pair(values) if bits == 4 else values), scales

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Quantise the activations, multiply, and add bias and residual."""
        rows, row_scales = round_rows(x.float())
        wide = rows.float()
        y = torch.cat([functional.linear(wide, self._widened(part)) for part in self._parts()], -1).mul_(row_scales)
        for addend in (self._bias, residual):
            if addend is not None:
                y += addend
        return y.to(x.dtype)

    def _parts(self) -> Iterator[slice]:
        step = max(1, CHUNK // self._width)
        return (slice(first, first + step) for first in range(0, self._num_columns, step))

    def _widened(self, part: slice) -> Tensor:
        """Return weights [columns, in] as float32."""
        values, scales = self._values[part], self._scales[part]
        if values.dtype == torch.uint8:
            values = torch.stack((values & 15, values >> 4), -1).to(torch.int8) - 8
        return (values.reshape(*scales.shape, -1) * scales[..., None].float()).view(len(values), self._width)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row of float32 [T, E] to int8 by its largest magnitude; return the codes and the scales [T, 1].

    A row that is not finite becomes zeros with a scale of NaN.
    """
    largest = x.abs().amax(-1, keepdim=True)
    largest = torch.where(largest.isfinite(), largest, torch.nan)
    # A GPU divides by a host scalar by multiplying with its reciprocal, which may be off by one bit.
    most = torch.full_like(largest, 127.0)
    inverse = torch.where(largest >= SMALLEST, most / largest, 0.0)
    return (x * inverse).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int8), torch.where(
        largest < SMALLEST, 0.0, largest / most
    )


def round_groups(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantise each group of float32 [T, E] to `bits` bits; the value of the largest magnitude gets the lowest code.

    Returns:
        Codes, int8 [T, E], and scales, bfloat16 [T, E / GROUP].
    """
    groups, lowest = x.reshape(len(x), -1, GROUP), -float(1 << (bits - 1))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales = torch.where(largest.abs() < SMALLEST, 0.0, largest / lowest).to(torch.bfloat16)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    values = (groups / scales.float()).round_().clamp_(lowest, -lowest - 1.0).nan_to_num_(0.0)
    return values.to(torch.int8).flatten(-2), scales.squeeze(-1)


def _pair(values: Tensor) -> Tensor:
    """Pack two values of -8..7 into a byte."""
    pairs = (values + 8).to(torch.uint8).view(len(values), -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4
