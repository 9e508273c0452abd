"""Exact kernels: stored weights have the values that their format defines, and activations are not rounded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.interface.ops import Activation, Linear
from quire.ops.interface.quantized_weight import PlainWeight, QuantizedWeight, StoredWeight, chunks
from quire.ops.pytorch.torch_ops import TorchOps

# Number of weights that are dequantised at a time, so that they stay in the CPU cache.
CHUNK = 1 << 20


class ExactOps(TorchOps):
    """Stock torch in float32, with the dequantised values of stored weights; nothing else is rounded."""

    def __init__(self, room: int = 0) -> None:
        super().__init__(torch.device("cpu"))
        self.name = "exact"
        self._room = room

    def pack_linear(
        self,
        weight: Tensor | StoredWeight,
        bias: Tensor | None = None,
        min_bits: int = 4,
        gate: Activation | None = None,
        num_slices: int = 1,  # noqa: ARG002 (no order of sums is promised)
        max_group: int = 32,  # noqa: ARG002 (nothing is rounded)
    ) -> Linear:
        """Keep a stored weight dequantised if there is room, else as it is stored."""
        if gate is None and isinstance(weight, StoredWeight):
            num_bytes = math.prod(weight.shape) * torch.float32.itemsize
            is_kept = num_bytes <= self._room
            self._room -= num_bytes if is_kept else 0
            return ExactLinear(weight, bias, is_kept)
        return super().pack_linear(weight, bias, min_bits, gate)


class ExactLinear:
    """A linear layer with the values of a stored weight, dequantised once, or in chunks of outputs at each call.

    Args:
        weight: weight whose parts may have different forms.
        bias: [out], or None.
        is_kept: True to dequantise once.
    """

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: StoredWeight, bias: Tensor | None, is_kept: bool = False) -> None:
        copied = StoredWeight(tuple(map(_held, weight.parts)), torch.float32, weight.input_order)
        self._weight = (
            StoredWeight((PlainWeight(torch.cat(list(_in_chunks(copied)))),), torch.float32) if is_kept else copied
        )
        self._bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply float32 activations by the dequantised weight."""
        whole = self._weight.parts[0]
        if isinstance(whole, PlainWeight) and len(self._weight.parts) == 1 and self._weight.input_order is None:
            y = functional.linear(x, whole.values)
        else:
            y = torch.cat([functional.linear(x, part) for part in _in_chunks(self._weight)], -1)
        for addend in (self._bias, residual):
            if addend is not None:
                y += addend
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """Look up rows of the weight: ids [T] to [T, in]."""
        return self._weight.rows(ids).dequantize()


def _in_chunks(weight: StoredWeight) -> Iterator[Tensor]:
    """Yield the dequantised rows of a weight in chunks."""
    return (weight.rows(part).dequantize() for part in chunks(*weight.shape, num_codes=CHUNK))


def _held(part: QuantizedWeight | PlainWeight) -> QuantizedWeight | PlainWeight:
    """Return a copy of a part in memory, since files may be closed after weights are packed."""
    if isinstance(part, PlainWeight):
        return PlainWeight(part.values.clone())
    return replace(part, read=part.read(slice(None)).apply(Tensor.clone).at, blocks=None)
