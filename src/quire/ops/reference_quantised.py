"""Slow reference implementations of linear layers with quantised weights: values by definition, exact integer sums."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.ops.quantized_weight import StoredWeight, factors_of, levels_of
from quire.ops.weight_formats import BITS, GROUP, SMALLEST, WeightFormat


class ReferenceQuantisedLinear:
    """A matmul of integer codes, summed exactly over all inputs that share a scale."""

    def __init__(self, format_name: WeightFormat, weight: Tensor, bias: Tensor | None) -> None:
        bits = BITS[format_name]
        self.values, self.scales = round_rows(weight) if bits == 8 else round_groups(weight, bits)
        self._bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply group by group, add, cast once."""
        rows, row_scales = round_rows(x)
        y = torch.zeros(len(x), len(self.values))
        for scales, values, part in zip(
            self.scales.T, *(each.chunk(self.scales.shape[1], -1) for each in (self.values, rows)), strict=True
        ):
            y += (part @ values.T).float() * scales
        y *= row_scales
        for addend in (self._bias, residual):
            if addend is not None:
                y += addend.float()
        return y.to(x.dtype)

    def dequantised(self) -> Tensor:
        """Return the dequantised weights, float32 [out, in]."""
        groups = self.values.view(*self.scales.shape, -1)
        return (groups * self.scales[..., None]).flatten(-2)


class ReferenceStoredLinear:
    """A matmul of integer codes with the levels of stored codes, summed exactly over all inputs that share a scale.

    Floating-point codes (e4m3) are multiplied with the activations themselves, and summed in float64.
    """

    def __init__(self, weight: StoredWeight, bias: Tensor | None) -> None:
        self._parts = [(part.form, part.read(slice(None))) for part in weight.quantized]
        self._whole, self._bias = weight.dequantize(), bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply group by group, add, cast once."""
        rows, row_scales = round_rows(x)
        columns = []
        for form, unpacked in self._parts:
            levels, (scales, mins) = levels_of(form, unpacked), factors_of(form, unpacked)
            if form.levels == "e4m3":
                products = torch.einsum("tgi,ngi->tng", x.double().reshape(len(x), -1, form.group), levels.double())
                columns.append((products * scales).sum(-1).float())
                continue
            values = rows.view(len(x), -1, form.group)
            whole = torch.einsum("tgi,ngi->tng", values, levels.long()).float()
            y = (whole * scales).sum(-1)
            if mins is not None:
                y -= (values.sum(-1).float()[:, None] * mins).sum(-1)
            columns.append(y * row_scales)
        y = torch.cat(columns, -1)
        for addend in (self._bias, residual):
            if addend is not None:
                y += addend.float()
        return y.to(x.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Look up rows of the weight."""
        return torch.stack([self._whole[token_id] for token_id in ids.tolist()])


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row [T, E] to -127..127 by its largest magnitude: codes, int64 [T, E], and scales [T, 1]."""
    values, scales = torch.zeros(x.shape, dtype=torch.int64), torch.zeros(len(x), 1)
    for idx, row in enumerate(x.float()):
        if not row.isfinite().all():
            scales[idx] = math.nan
        elif (largest := row.abs().max()) >= SMALLEST:
            values[idx] = (row * torch.div(torch.tensor(127.0), largest)).round().long()
            scales[idx] = largest / 127.0
    return values, scales


def round_groups(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantise each group of a row [T, E] to `bits` bits; the (first) largest magnitude gets the lowest code.

    Returns:
        Codes, int64 [T, E], and scales [T, E / GROUP], in float32 with the precision of bfloat16.
    """
    values, scales = torch.zeros(x.shape, dtype=torch.int64), torch.zeros(len(x), x.shape[1] // GROUP)
    lowest = -(1 << (bits - 1))
    for row_idx, row in enumerate(x.float()):
        for idx, group in enumerate(row.split(GROUP)):
            scale = (group[group.abs().argmax()] / lowest).bfloat16().float()
            if not (group.isfinite().all() and scale.isfinite()):
                scales[row_idx, idx] = math.nan
            elif group.abs().max() >= SMALLEST:
                numbers = (group / scale).round().clamp(lowest, -lowest - 1).long()
                values[row_idx, idx * GROUP : (idx + 1) * GROUP] = numbers
                scales[row_idx, idx] = scale
    return values, scales
