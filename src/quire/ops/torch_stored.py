"""Linear layers with stored quantised weights, by stock torch operators: a byte per code."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.quantized_weight import StoredWeight, chunks, dequantize
from quire.ops.torch_quantised import round_rows

# Number of codes that are dequantised at a time, so that they stay in the CPU cache.
CHUNK = 1 << 20


class TorchStoredLinear:
    """A matmul with a quantised weight, which is dequantised a chunk of columns at a time.

    Activations are quantised to int8, except for e4m3 weights.

    Args:
        weight: weight without unquantised parts.
        bias: [out], or None.
        device: device of the weight.
    """

    __slots__ = ("_bias", "_dtype", "_parts", "_rounds")

    def __init__(self, weight: StoredWeight, bias: Tensor | None, device: torch.device) -> None:
        self._parts = [
            (part.form, part.read(slice(None)).apply(lambda field: field.to(device))) for part in weight.quantized
        ]
        self._rounds = any(form.levels != "e4m3" for form, _ in self._parts)
        self._dtype, self._bias = weight.dtype, bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Quantise the activations, multiply, and add bias and residual."""
        plain = x.float()
        if self._rounds:
            rows, row_scales = round_rows(plain)
            wide = rows.float()
        products = [
            functional.linear(plain, weights) if is_plain else functional.linear(wide, weights).mul_(row_scales)
            for is_plain, weights in self._dequantized()
        ]
        y = torch.cat(products, -1)
        for addend in (self._bias, residual):
            if addend is not None:
                y += addend
        return y.to(x.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Look up rows of the weight: ids [T] to [T, in].

        Raises:
            IndexError: an id is out of range.
        """
        output = torch.empty(len(ids), self._parts[0][1].codes.shape[1], dtype=self._dtype, device=ids.device)
        start, num_found = 0, 0
        for form, unpacked in self._parts:
            count = len(unpacked.codes)
            (places,) = ((ids >= start) & (ids < start + count)).nonzero(as_tuple=True)
            output[places] = dequantize(form, unpacked.at(ids[places] - start)).to(self._dtype)
            start, num_found = start + count, num_found + len(places)
        if num_found < len(ids):
            raise IndexError(f"rows are from 0 to {start - 1}, got ids from {ids.min()} to {ids.max()}")
        return output

    def _dequantized(self) -> Iterator[tuple[bool, Tensor]]:
        """Yield chunks of the weight, and whether activations are not quantised for them."""
        for form, unpacked in self._parts:
            for part in chunks(len(unpacked.codes), unpacked.codes.shape[1], num_codes=CHUNK):
                yield form.levels == "e4m3", dequantize(form, unpacked.at(part))
