"""Quantisation of weights while they are loaded, to the in-memory form of stored quantised weights."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from quire.ops.quantized_weight import QuantizedRows, QuantizedWeight, StoredWeight, WeightForm
from quire.ops.torch_quantised import round_groups, round_rows
from quire.ops.weight_formats import BITS, WeightFormat

FORMS: Final = {
    "int6": WeightForm(6, 32, "bfloat16", offset=32),
    "int4": WeightForm(4, 32, "bfloat16", offset=8),
}
# Forms of int8, the largest group first: kernels read a scale per group; all groups of a row have the same scale.
INT8_FORMS: Final = (
    WeightForm(8, 128, "float32", offset=128),
    WeightForm(8, 32, "float32", offset=128),
    WeightForm(8, 16, "float32", offset=128),
)


def rounded_form(name: WeightFormat, width: int) -> WeightForm | None:
    """Return the form of a quantised weight with `width` inputs; None if the kernels support no group size for it."""
    if name != "int8":
        return FORMS[name]
    return next((form for form in INT8_FORMS if width % form.group == 0), None)


def round_weight(weight: Tensor, name: WeightFormat, device: torch.device) -> StoredWeight | None:
    """Return a weight whose rows are quantised when they are read, to the codes and scales of `TorchQuantisedLinear`.

    Only the rows that are being read are in float32, so little memory is needed in addition to the codes. A row (int8)
    or a group (fewer bits) that is not finite gets a scale of NaN.

    Args:
        weight: [out, in], of any dtype and on any device; the result refers to it.
        name: format that `weight_format` returned for its width.
        device: device on which rows are quantised.

    Returns:
        None if the kernels do not support the weight, which then stays unquantised: int8 with a width that is no
        multiple of 16.
    """
    num_rows, width = weight.shape
    form = rounded_form(name, width)
    if form is None:
        return None
    bits, num_groups, offset = BITS[name], width // form.group, form.offset

    def read(rows: slice | Tensor) -> QuantizedRows:
        values = weight[rows].to(device).float()
        numbers, scales = round_rows(values) if bits == 8 else round_groups(values, bits)
        return QuantizedRows((numbers.short() + offset).to(torch.uint8), scales.expand(-1, num_groups))

    num_bytes = num_rows * (width * bits // 8 + num_groups * getattr(torch, form.scale).itemsize)
    return StoredWeight((QuantizedWeight(form, (num_rows, width), read, num_bytes),), weight.dtype)
