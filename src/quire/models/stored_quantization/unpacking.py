"""Unpacking of codes, scales and orders of inputs in layouts that several methods share."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

from quire.errors import CheckpointError, shown
from quire.ops.interface.quantized_weight import WeightForm

# Values of 4-bit floating-point codes (E2M1), doubled to be integers; their scales are halved.
FP4_LEVELS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
MXFP4_FORM: Final = WeightForm(bits=4, group=32, scale="bfloat16", levels=FP4_LEVELS)


@cache
def e8m0_values() -> Tensor:
    """Return the value 2 ** (e - 127) of each E8M0 byte e, float32 [256]; NaN for 255."""
    return torch.tensor([2.0 ** (e - 127) for e in range(255)] + [float("nan")], device="cpu")


@cache
def _halved_scales() -> Tensor:
    """Return the halves of `e8m0_values` in bfloat16, which represents them exactly."""
    return (e8m0_values() / 2).bfloat16()


def unpack_rows(packed: Tensor, bits: int) -> Tensor:
    """Return the codes of rows that are packed along the inputs, with the first input in the lowest bits."""
    octets = packed.view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def unpack_columns(words: Tensor, bits: int, columns: Tensor, order: Tensor | None = None) -> Tensor:
    """Return some columns of codes that are packed along the columns."""
    per_word = 32 // bits
    places = columns % per_word
    if order is not None:
        places = order[places]
    # All columns of a word are unpacked together, then the wanted columns are copied as rows.
    needed, word = torch.unique(columns // per_word, return_inverse=True)
    # A view of bytes needs the stride 1, and `contiguous` keeps another stride for a single row.
    octets = words.index_select(1, needed).t().clone(memory_format=torch.contiguous_format).view(torch.uint8)
    octets = octets.view(len(needed), len(words), 4).transpose(1, 2)
    codes = octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=2)
    return codes.reshape(len(needed) * per_word, len(words)).index_select(0, word * per_word + places)


def order_inputs(codes: Tensor, order: Tensor | None) -> Tensor:
    """Return codes [M, K] with reordered columns; None keeps the order."""
    # `gather` is much faster than an index along the second dimension.
    return codes if order is None else codes.gather(1, order.expand(codes.shape))


def repeat_groups(groups: Tensor, group_size: int, num_inputs: int, form: WeightForm) -> Tensor:
    """Repeat the values of stored groups [M, ceil(K / group_size)] for the groups of the form, [M, K / G]."""
    num_groups = num_inputs // form.group
    repeats = min(group_size, num_inputs) // form.group
    return groups if repeats == 1 else groups.repeat_interleave(repeats, 1)[:, :num_groups].contiguous()


def check_scales(layer: str, scales: Tensor) -> Tensor:
    """Return scales after a check that all are finite."""
    if not bool(scales.isfinite().all()):
        raise CheckpointError(f"layer {shown(layer)} has scales that are infinite or no numbers")
    return scales


def mx_scales(layer: str, exponents: Tensor) -> Tensor:
    """Return the scales of `MXFP4_FORM` for E8M0 bytes."""
    return check_scales(layer, _halved_scales()[exponents.view(torch.uint8).int()])


def sort_inputs(layer: str, groups: Tensor, group_size: int) -> Tensor | None:
    """Return the order of inputs that makes groups adjacent, int64 [K]; None if they are adjacent already."""
    in_order = torch.arange(len(groups)) // group_size
    if torch.equal(groups.long(), in_order):
        return None
    # A stable sort keeps the order of inputs within a group.
    ordered, order = groups.long().sort(stable=True)
    if not torch.equal(ordered, in_order):
        raise CheckpointError(
            f"layer {shown(layer)} has a g_idx that does not divide {len(groups)} inputs into groups of {group_size}"
        )
    return order
