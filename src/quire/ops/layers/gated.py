"""A linear layer followed by a gated activation."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire.ops.interface.ops import Activation, Linear


class GatedLinear:
    """A gated linear layer in two calls: the linear layer, and the gated activation of the two halves of its output."""

    __slots__ = ("_gate", "activation", "linear")

    def __init__(self, linear: Linear, gate: Callable[[Tensor, Activation], Tensor], activation: Activation) -> None:
        self.linear = linear
        self._gate = gate
        self.activation: Activation = activation

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply, then gate: [T, E] to [T, F]; a residual is [T, 2 F]."""
        return self._gate(self.linear(x, residual), self.activation)
