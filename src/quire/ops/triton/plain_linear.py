"""Linear layers on plain weights: torch's product, on a weight that other kernels can read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.interface import Activation


class TritonLinear:
    """A product by torch, and perhaps the gate of its halves.

    Args:
        weight: [out, in], on its device; kept.
        bias: [out], or None.
        activation: activation of the gate; None for none.
        gate: `Ops.gate` of the backend.

    Attributes:
        weight, bias, activation: the arguments of these names.
    """

    __slots__ = ("_gate", "activation", "bias", "weight")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        activation: Activation | None,
        gate: Callable[[Tensor, Activation], Tensor],
    ) -> None:
        self.weight, self.bias = weight, bias
        self.activation: Activation | None = activation
        self._gate = gate

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply and add, then gate."""
        if residual is None:
            y = functional.linear(x, self.weight, self.bias)
        else:
            y = torch.addmm(residual, x, self.weight.T)
            if self.bias is not None:
                y += self.bias
        return y if self.activation is None else self._gate(y, self.activation)
