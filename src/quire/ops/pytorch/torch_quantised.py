"""Linear layers with quantised weights, by stock torch operators: less memory, but not faster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.interface.quantized_weight import QuantizedRows, StoredWeight, WeightForm, chunks, dequantize
from quire.ops.interface.weight_formats import SMALLEST

# Number of codes that are dequantised at a time, so that they stay in the CPU cache.
CHUNK: Final = 1 << 20


class TorchQuantisedLinear:
    """A matmul with a quantised weight, which is dequantised a chunk of columns at a time.

    Activations are quantised to int8 in groups, except for e4m3 weights. There is no look-up of rows, as the weight may
    have been quantised while it was loaded.

    Args:
        weight: weight without unquantised parts.
        bias: [out], or None.
        device: device of the weight.
    """

    __slots__ = ("_bias", "_dtype", "_parts", "_width", "rounds_inputs")

    def __init__(self, weight: StoredWeight, bias: Tensor | None, device: torch.device) -> None:
        self._parts = [
            (part.form, _paired(part.form, part.read(slice(None)).apply(lambda field: field.to(device))))
            for part in weight.quantized
        ]
        self._dtype, self._bias, self._width = weight.dtype, bias, weight.shape[1]
        self.rounds_inputs = weight.rounds_inputs

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Quantise the activations, multiply, and add bias and residual."""
        plain = x.float()
        groups = {form.group for form, _ in self._parts if form.levels != "e4m3"}
        rounded = {group: rounded_rows(plain, group) for group in groups}
        products = []
        for form, part in self._parts:
            rows = plain if form.levels == "e4m3" else rounded[form.group]
            products += [functional.linear(rows, weights) for weights in self._dequantized(form, part)]
        y = torch.cat(products, -1)
        for addend in (self._bias, residual):
            if addend is not None:
                y += addend
        return y.to(x.dtype)

    def _dequantized(self, form: WeightForm, part: QuantizedRows) -> Iterator[Tensor]:
        """Yield chunks of rows of the weight."""
        for rows in chunks(len(part.codes), self._width, num_codes=CHUNK):
            yield dequantize(form, _unpaired(form, part.at(rows)))


class TorchStoredLinear(TorchQuantisedLinear):
    """A linear layer with a weight that the checkpoint stores quantised, whose rows can be looked up."""

    __slots__ = ()

    def rows(self, ids: Tensor) -> Tensor:
        """Look up rows of the weight: ids [T] to [T, in]."""
        output = torch.empty(len(ids), self._width, dtype=self._dtype, device=ids.device)
        start, num_found = 0, 0
        for form, part in self._parts:
            count = len(part.codes)
            (places,) = ((ids >= start) & (ids < start + count)).nonzero(as_tuple=True)
            output[places] = dequantize(form, _unpaired(form, part.at(ids[places] - start))).to(self._dtype)
            start, num_found = start + count, num_found + len(places)
        if num_found < len(ids):
            raise IndexError(f"rows are from 0 to {start - 1}, got ids from {ids.min()} to {ids.max()}")
        return output


def rounded_rows(x: Tensor, group: int) -> Tensor:
    """Return float32 rows [T, K] as int8 times the scales of groups of inputs, [T, K padded to whole groups].

    A group that is not finite becomes NaN.
    """
    codes, scales = round_inputs(x, group)
    return (codes * scales[..., None]).flatten(-2)


def round_inputs(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantise groups of inputs of float32 [T, K] to int8 by their largest magnitude."""
    groups = padded_groups(x, group)
    largest = groups.abs().amax(-1, keepdim=True)
    largest = torch.where(largest.isfinite(), largest, torch.nan)
    # A GPU divides by a host scalar by multiplying with its reciprocal, which may be off by one bit.
    most = torch.full_like(largest, 127.0)
    inverse = torch.where(largest >= SMALLEST, most / largest, 0.0)
    codes = (groups * inverse).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)
    return codes, torch.where(largest < SMALLEST, 0.0, largest / most).squeeze(-1)


def padded_groups(x: Tensor, group: int) -> Tensor:
    """Return rows [T, K] in groups of inputs [T, groups, G]; the last group is padded with zeros."""
    missing = -x.shape[1] % group
    return (functional.pad(x, (0, missing)) if missing else x).reshape(len(x), -1, group)


def _paired(form: WeightForm, rows: QuantizedRows) -> QuantizedRows:
    """Store two codes of four bits in a byte."""
    if form.bits != 4:
        return rows
    return rows._replace(codes=rows.codes[:, 0::2] | rows.codes[:, 1::2] << 4)


def _unpaired(form: WeightForm, rows: QuantizedRows) -> QuantizedRows:
    if form.bits != 4:
        return rows
    return rows._replace(codes=torch.stack((rows.codes & 15, rows.codes >> 4), -1).flatten(-2))
