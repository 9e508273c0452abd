"""Linear layers on plain weights: few rows by a Triton GEMV, others by torch; grouped GEMMs can read the weight too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.interface.ops import Activation
from quire.ops.triton.launches import Device
from quire.ops.triton.linear.few_rows import MOST_ROWS, FewRowsTile, is_readable, multiply


class TritonLinear:
    """A linear layer, with an optional gate of its output's halves.

    Args:
        weight: [out, in], on its device; not copied.
        bias: [out], or None.
        activation: activation of the gate; None for none.
        gate: `Ops.gate` of the backend.
        device: device of the weight.
    """

    __slots__ = ("_device", "_few", "_gate", "activation", "bias", "weight")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None,
        gate: Callable[[Tensor, Activation], Tensor],
        device: Device,
    ) -> None:
        self.weight, self.bias = weight, bias
        self.activation: Activation | None = activation
        self._gate, self._device = gate, device
        is_gated, (num_columns, width) = activation is not None, weight.shape
        # Tiles by the number of rows; None for rows that torch multiplies.
        self._few = [
            FewRowsTile.of(num_rows, num_columns // (1 + is_gated), width, is_gated) if is_readable(weight) else None
            for num_rows in range(MOST_ROWS + 1)
        ]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply, add bias and residual, then gate."""
        if 0 < len(x) <= MOST_ROWS:
            tile = self._few[len(x)]
            if tile is not None and x.stride(1) == 1:
                return multiply(x, self.weight, self.bias, residual, self.activation, tile, self._device)
        if residual is None:
            y = functional.linear(x, self.weight, self.bias)
        else:
            y = torch.addmm(residual, x, self.weight.T)
            if self.bias is not None:
                y += self.bias
        return y if self.activation is None else self._gate(y, self.activation)

    def rows(self, ids: Tensor) -> Tensor:
        """Look up rows of the weight, as an embedding with tied weights: ids [T] to [T, in]."""
        return torch.embedding(self.weight, ids)
