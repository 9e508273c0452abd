"""Exact kernels: stored weights have the values that their format defines, and activations are not rounded."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.interface import Activation, Linear
from quire.ops.quantized_weight import PlainWeight, QuantizedWeight, StoredWeight, chunks
from quire.ops.torch_ops import TorchOps

# Number of weights that are dequantised at a time, so that they stay in the CPU cache.
CHUNK = 1 << 20


class ExactOps(TorchOps):
    """Stock torch in float32, with the dequantised values of stored weights; nothing else is rounded."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.name = "exact"

    def pack_linear(
        self,
        weight: Tensor | StoredWeight,
        bias: Tensor | None = None,
        min_bits: int = 4,
        gate: Activation | None = None,
    ) -> Linear:
        """Keep a stored weight as it is stored."""
        if gate is None and isinstance(weight, StoredWeight):
            return ExactLinear(weight, bias)
        return super().pack_linear(weight, bias, min_bits, gate)


class ExactLinear:
    """A linear layer whose stored weight is dequantised a chunk of outputs at a time, at each call.

    Args:
        weight: weight whose parts may have different forms.
        bias: [out], or None.
    """

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: StoredWeight, bias: Tensor | None) -> None:
        self._weight = StoredWeight(tuple(map(_held, weight.parts)), torch.float32, weight.input_order)
        self._bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply float32 activations by the dequantised weight."""
        parts = chunks(*self._weight.shape, num_codes=CHUNK)
        y = torch.cat([functional.linear(x, self._weight.rows(part).dequantize()) for part in parts], -1)
        for addend in (self._bias, residual):
            if addend is not None:
                y += addend
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """Look up rows of the weight: ids [T] to [T, in].

        Raises:
            IndexError: an id that is no row.
        """
        return self._weight.rows(ids).dequantize()


def _held(part: QuantizedWeight | PlainWeight) -> QuantizedWeight | PlainWeight:
    """Return a part in memory of its own: files may be closed after weights are packed."""
    if isinstance(part, PlainWeight):
        return PlainWeight(part.values.clone())
    return replace(part, read=part.read(slice(None)).apply(Tensor.clone).at, blocks=None)
