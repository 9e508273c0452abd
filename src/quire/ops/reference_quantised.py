"""Slow reference implementations of linear layers with quantised weights: values by definition, exact integer sums."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.ops.quantized_weight import (
    INPUT_GROUP,
    QuantizedRows,
    QuantizedWeight,
    StoredWeight,
    factors_of,
    levels_of,
)
from quire.ops.weight_formats import FORMS, SMALLEST, WeightFormat


class ReferenceQuantisedLinear:
    """A matmul of integer levels, summed exactly over all inputs that share a scale.

    Floating-point codes (e4m3) are multiplied with the activations themselves, and summed in float64.

    Args:
        weight: weight without unquantised parts.
        bias: [out], or None.
    """

    def __init__(self, weight: StoredWeight, bias: Tensor | None) -> None:
        self._parts = [(part.form, part.read(slice(None))) for part in weight.quantized]
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply group by group, add, cast once."""
        rows, row_scales = round_inputs(x)
        columns = []
        for form, unpacked in self._parts:
            levels, (scales, mins) = levels_of(form, unpacked), factors_of(form, unpacked)
            num_groups = levels.shape[1]
            if form.levels == "e4m3":
                products = torch.einsum("tgi,ngi->tng", x.double().reshape(len(x), -1, form.group), levels.double())
                columns.append((products * scales).sum(-1).float())
                continue
            values = rows.view(len(x), -1, form.group)[:, :num_groups]
            factors = row_scales.repeat_interleave(INPUT_GROUP // form.group, -1)[:, None, :num_groups]
            whole = torch.einsum("tgi,ngi->tng", values, levels.long()).float()
            y = (whole * (scales * factors)).sum(-1)
            if mins is not None:
                y -= (values.sum(-1).float()[:, None] * factors * mins).sum(-1)
            columns.append(y)
        y = torch.cat(columns, -1)
        for addend in (self._bias, residual):
            if addend is not None:
                y += addend.float()
        return y.to(x.dtype)

    def dequantised(self) -> Tensor:
        """Return the dequantised weights, float32 [out, in padded to whole groups]."""
        return torch.cat([part.dequantize() for part in self._weight.quantized])


class ReferenceStoredLinear(ReferenceQuantisedLinear):
    """A linear layer with a weight that the checkpoint stores quantised, whose rows can be looked up."""

    def __init__(self, weight: StoredWeight, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self._whole = weight.dequantize()

    def rows(self, ids: Tensor) -> Tensor:
        """Look up rows of the weight."""
        return torch.stack([self._whole[token_id] for token_id in ids.tolist()])


def round_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each group of a row [T, K] to -127..127 by its largest magnitude.

    Returns:
        Codes, int64 [T, K padded to whole groups], and scales, float32 [T, groups].
    """
    num_groups = -(-x.shape[1] // INPUT_GROUP)
    codes, scales = torch.zeros(len(x), num_groups * INPUT_GROUP, dtype=torch.int64), torch.zeros(len(x), num_groups)
    for row_idx, row in enumerate(x.float()):
        for idx, group in enumerate(row.split(INPUT_GROUP)):
            if not group.isfinite().all():
                scales[row_idx, idx] = math.nan
            elif (largest := group.abs().max()) >= SMALLEST:
                rounded = (group * torch.div(torch.tensor(127.0), largest)).round().long()
                codes[row_idx, idx * INPUT_GROUP : idx * INPUT_GROUP + len(group)] = rounded
                scales[row_idx, idx] = largest / 127.0
    return codes, scales


def round_weight(weight: Tensor, name: WeightFormat) -> StoredWeight:
    """Quantise each group of a weight [N, K]; the (first) largest magnitude gets the lowest code."""
    form = FORMS[name]
    lowest, num_groups = -(1 << (form.bits - 1)), -(-weight.shape[1] // INPUT_GROUP)
    codes = torch.full((len(weight), num_groups * INPUT_GROUP), form.offset, dtype=torch.uint8)
    scales = torch.zeros(len(weight), num_groups, dtype=torch.bfloat16)
    for row_idx, row in enumerate(weight.float()):
        for idx, group in enumerate(row.split(INPUT_GROUP)):
            scale = (group[group.abs().argmax()] / lowest).bfloat16()
            if not (group.isfinite().all() and scale.isfinite()):
                scales[row_idx, idx] = math.nan
            elif group.abs().max() >= SMALLEST:
                levels = (group / scale.float()).round().clamp(lowest, -lowest - 1)
                codes[row_idx, idx * INPUT_GROUP : idx * INPUT_GROUP + len(group)] = (levels + form.offset).byte()
                scales[row_idx, idx] = scale
    rows = QuantizedRows(codes, scales)
    quantized = QuantizedWeight(form, (codes.shape[0], codes.shape[1]), rows.at, codes.nbytes)
    return StoredWeight((quantized,), weight.dtype)
