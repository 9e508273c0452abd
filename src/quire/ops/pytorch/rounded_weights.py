"""Quantisation of weights while they are loaded, to the in-memory form of stored quantised weights."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.interface.quantized_weight import QuantizedRows, QuantizedWeight, StoredWeight
from quire.ops.interface.weight_formats import FORMS, SMALLEST, WeightFormat
from quire.ops.pytorch.torch_quantised import padded_groups


def round_weight(weight: Tensor, name: WeightFormat, device: torch.device) -> StoredWeight:
    """Return a weight whose rows are quantised when they are read, to the codes and scales of the native kernels.

    Only the rows that are being read are in float32, so little memory is needed in addition to the codes. A group that
    is not finite gets a scale of NaN.

    Args:
        weight: [out, in], of any dtype and on any device; the result refers to it, and its inputs are padded with zeros
            to whole groups.
        name: format of the weight.
        device: device on which rows are quantised.
    """
    form, (num_rows, num_inputs) = FORMS[name], weight.shape
    num_groups = -(-num_inputs // form.group)

    def read(rows: slice | Tensor) -> QuantizedRows:
        levels, scales = round_groups(weight[rows].to(device).float(), form.bits, form.group)
        return QuantizedRows((levels.short() + form.offset).to(torch.uint8), scales)

    num_bytes = num_rows * num_groups * (form.group * form.bits // 8 + torch.bfloat16.itemsize)
    quantized = QuantizedWeight(form, (num_rows, num_groups * form.group), read, num_bytes)
    return StoredWeight((quantized,), weight.dtype)


def round_groups(x: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Quantise groups of float32 [N, K] to `bits` bits; the first value of largest magnitude gets the lowest level."""
    groups, lowest = padded_groups(x, group), -float(1 << (bits - 1))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales = torch.where(largest.abs() < SMALLEST, 0.0, largest / lowest).to(torch.bfloat16)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    levels = (groups / scales.float()).round_().clamp_(lowest, -lowest - 1.0).nan_to_num_(0.0)
    return levels.to(torch.int8).flatten(-2), scales.squeeze(-1)
