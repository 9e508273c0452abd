"""The experts of a layer as two grouped GEMMs; the host does not wait for the number of rows per expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from quire.ops.interface.fused_layers import RoutedExperts
from quire.ops.interface.ops import Activation
from quire.ops.triton.linear.expert_rows import RowGroups, choose, group_rows
from quire.ops.triton.linear.plain_experts import plain_layer
from quire.ops.triton.linear.stored_experts import stored_layer


class GroupedLinear(Protocol):
    """The first or the second layer of all experts.

    Attributes:
        activation: activation of the layers' gate, which is left to the caller; None for none.
    """

    @property
    def activation(self) -> Activation | None: ...

    def multiply(self, x: Tensor, groups: RowGroups, *, is_first: bool, scales_input: bool) -> Tensor:
        """Multiply grouped rows by their experts.

        Args:
            x: rows of the step [T, in] for the first layer; grouped output of the first layer [T * C, in] for the
                second.
            is_first: True for the first layer.
            scales_input: rows are multiplied by their routing weights before the first layer, not after the second.

        Returns:
            [T * C, out], of the dtype of `x` for the first layer, float32 for the second.
        """


class TritonExperts:
    """The experts of a layer."""

    def __init__(
        self,
        experts: RoutedExperts,
        gate_ups: GroupedLinear,
        downs: GroupedLinear,
        gate: Callable[[Tensor, Activation], Tensor],
    ) -> None:
        self._experts, self._gate_ups, self._downs, self._gate = experts, gate_ups, downs, gate
        self._here = range(experts.first_expert, experts.first_expert + len(experts.downs))

    def __call__(self, x: Tensor, routed: Tensor, start: Tensor | None) -> Tensor:
        """Run the experts; see `FusedExperts`."""
        experts = self._experts
        total = self._begin(x, start)
        if not len(x):
            return total.to(x.dtype)
        chosen, scores = choose(experts.router(routed), experts)
        groups = group_rows(chosen, scores, experts.num_experts, self._here)
        scales_input, activation = experts.scaled_input, self._gate_ups.activation
        inner = self._gate_ups.multiply(x, groups, is_first=True, scales_input=scales_input)
        if activation is not None:
            inner = self._gate(inner, activation)
        outputs = self._downs.multiply(inner, groups, is_first=False, scales_input=scales_input)
        if groups.is_last_absent is not None:
            outputs[-1].masked_fill_(groups.is_last_absent, 0.0)
        # Each row's expert outputs are added in the order of their scores, independently of other rows of the step.
        for idxs in groups.places.unbind(1):
            total += outputs[idxs]
        return total.to(x.dtype)

    def _begin(self, x: Tensor, start: Tensor | None) -> Tensor:
        """Return the float32 sums that experts add to: `start`, and the shared expert's output."""
        shared, gate = self._experts.shared, self._experts.shared_gate
        if shared is not None and gate is None:
            return shared.down(shared.gate_up(x), start).float()
        total = torch.zeros_like(x, dtype=torch.float32) if start is None else start.to(torch.float32, copy=True)
        if shared is not None and gate is not None:
            total.addcmul_(gate(x).float().sigmoid_(), shared.down(shared.gate_up(x)).float())
        return total


def fuse_experts(experts: RoutedExperts, gate: Callable[[Tensor, Activation], Tensor]) -> TritonExperts | None:
    """Return experts as grouped GEMMs; None if they take adapters, or their layers cannot be grouped."""
    if experts.adapters is not None:
        return None
    gate_ups, downs = (plain_layer(layers) or stored_layer(layers) for layers in (experts.gate_ups, experts.downs))
    return None if gate_ups is None or downs is None else TritonExperts(experts, gate_ups, downs, gate)
