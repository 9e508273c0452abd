"""Slow reference implementations of linear layers with quantised weights: values by definition, exact integer sums."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.ops.interface.quantized_weight import QuantizedRows, QuantizedWeight, StoredWeight, factors_of, levels_of
from quire.ops.interface.weight_formats import FORMS, SMALLEST, WeightFormat


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
        self.rounds_inputs = weight.rounds_inputs

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply group by group, add, cast once."""
        columns = []
        for form, unpacked in self._parts:
            levels, (scales, mins) = levels_of(form, unpacked), factors_of(form, unpacked)
            if form.levels == "e4m3":
                products = torch.einsum("tgi,ngi->tng", x.double().reshape(len(x), -1, form.group), levels.double())
                columns.append((products * scales).sum(-1).float())
                continue
            values, row_scales = round_inputs(x, form.group)
            whole = torch.einsum("tgi,ngi->tng", values, levels.long()).float()
            y = (whole * (scales * row_scales[:, None])).sum(-1)
            if mins is not None:
                y -= ((values.sum(-1).float() * row_scales)[:, None] * mins).sum(-1)
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


def round_inputs(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantise each group of inputs of a row [T, K] to -127..127 by its largest magnitude."""
    num_groups = -(-x.shape[1] // group)
    codes, scales = torch.zeros(len(x), num_groups, group, dtype=torch.int64), torch.zeros(len(x), num_groups)
    for row_idx, row in enumerate(x.float()):
        for idx, inputs in enumerate(row.split(group)):
            if not inputs.isfinite().all():
                scales[row_idx, idx] = math.nan
            elif (largest := inputs.abs().max()) >= SMALLEST:
                codes[row_idx, idx, : len(inputs)] = (inputs * torch.div(torch.tensor(127.0), largest)).round().long()
                scales[row_idx, idx] = largest / 127.0
    return codes, scales


def round_weight(weight: Tensor, name: WeightFormat) -> StoredWeight:
    """Quantise each group of a weight [N, K]; the (first) largest magnitude gets the lowest code."""
    form = FORMS[name]
    lowest, num_groups = -(1 << (form.bits - 1)), -(-weight.shape[1] // form.group)
    codes = torch.full((len(weight), num_groups * form.group), form.offset, dtype=torch.uint8)
    scales = torch.zeros(len(weight), num_groups, dtype=torch.bfloat16)
    for row_idx, row in enumerate(weight.float()):
        for idx, group in enumerate(row.split(form.group)):
            scale = (group[group.abs().argmax()] / lowest).bfloat16()
            if not (group.isfinite().all() and scale.isfinite()):
                scales[row_idx, idx] = math.nan
            elif group.abs().max() >= SMALLEST:
                levels = (group / scale.float()).round().clamp(lowest, -lowest - 1)
                codes[row_idx, idx * form.group :][: len(group)] = (levels + form.offset).byte()
                scales[row_idx, idx] = scale
    rows = QuantizedRows(codes, scales)
    quantized = QuantizedWeight(form, (codes.shape[0], codes.shape[1]), rows.at, codes.nbytes)
    return StoredWeight((quantized,), weight.dtype)
