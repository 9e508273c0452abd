"""Experts of transformers' modules on packed weights, under the name "quire" in transformers' registry of experts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from quire.models.modules.experts import ExpertProjections
from quire.models.modules.weight_slots import WeightSlot
from quire.models.specs.parameter_counts import DOWN_GROUP
from quire.models.specs.spec import Experts
from quire.ops.interface.adapted_experts import group_pairs
from quire.ops.interface.ops import Activation, Ops

# Name of the function of experts: the value of a configuration's `_experts_implementation`.
NAME: Final = "quire"
DOWN: Final = "down_proj"
# Names of the first projection of all experts: of gate and up, or of experts without gates.
GATED: Final = "gate_up_proj"
PLAIN: Final = "up_proj"
_ATTRIBUTE: Final = "_hosted_experts"


def use_packed_experts(module: nn.Module) -> None:
    """Make a module's experts run by `HostedExperts`, where they ask transformers' registry."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, _run)
    # The first versions of transformers 5 accept their own names only when a module is built.
    for layer in module.modules():
        config: Any = getattr(layer, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = NAME


def _run(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts of a module; in a trial step, which has no weights, return the shape of the result only."""
    if hidden_states.device.type == "meta":
        return torch.empty_like(hidden_states)
    packed: HostedExperts = getattr(module, _ATTRIBUTE)
    return packed(hidden_states, top_k_index, top_k_weights)


def runs_registered_experts(module: nn.Module) -> bool:
    """Return whether a module runs its experts by the registered function, over weights of all experts."""
    config, down = getattr(module, "config", None), module._parameters.get(DOWN)
    # `use_experts_implementation` wraps the forward pass of the classes that ask the registry.
    is_registered = hasattr(type(module).forward, "__wrapped__") and hasattr(module, "is_transposed")
    return is_registered and getattr(config, "_experts_implementation", None) == NAME and down is not None


class HostedExperts:
    """The experts of one module.

    Args:
        module: module of transformers, with its parameters on the meta device; they are removed.
        ops: kernels.
        turned: parameters that come as [X, out, in] although the module has them as [X, in, out].

    Attributes:
        projections: the packed layers by the names of the module's parameters.
        slots: slots of the module's parameters, by their names.
    """

    def __init__(self, module: Any, ops: Ops, turned: Collection[str] = ()) -> None:
        has_gate = getattr(module, "has_gate", True)  # transformers 5.0 has no experts without
        first = GATED if has_gate else PLAIN
        down = module._parameters[DOWN]
        num_experts, inner, width = (
            down.shape if module.is_transposed else (down.shape[0], down.shape[2], down.shape[1])
        )
        activation = _gate_of(module) if has_gate else None
        of_first, of_down = (
            Experts(num_experts, 1, inner, transposed=module.is_transposed and name not in turned, bias=module.has_bias)
            for name in (first, DOWN)
        )
        num_outputs = 2 * inner if has_gate else inner
        self._first = ExpertProjections(of_first, width, num_outputs, ops, gate=activation)
        self._down = ExpertProjections(of_down, inner, width, ops, max_group=DOWN_GROUP)
        self.projections = {first: self._first, DOWN: self._down}
        self._bounds = (0, num_experts)
        self._activate: Callable[[Tensor], Tensor] | None = None
        if activation is None:
            self._activate = module._apply_gate if has_gate else module.act_fn
        self._norm: Callable[[Tensor], Tensor] | None = None
        if getattr(module, "has_post_expert_norm", False):
            self._norm = module.post_expert_norm
        # Biases come first: the experts are packed with them.
        self.slots: Mapping[str, WeightSlot] = {
            f"{name}{suffix}": projections.slots[slot]
            for name, projections in self.projections.items()
            for slot, suffix in (("bias", "_bias"), ("weight", ""))
            if slot in projections.slots
        }
        for name in self.slots:
            delattr(module, name)
        setattr(module, _ATTRIBUTE, self)

    def __call__(self, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each row's experts, added in float32 in the order of the experts.

        Args:
            x: [T, E].
            chosen: int64 [T, C], experts of each row; an index after the last expert is none.
            scores: [T, C], factors of their outputs.
        """
        total = torch.zeros_like(x, dtype=torch.float32)
        pairs = group_pairs(chosen, self._bounds, self._bounds[1], None)
        rows, factors = pairs.places // chosen.shape[1], scores.flatten()[pairs.places][:, None].float()
        seen = x[rows]
        for idx, span in pairs.spans:
            inner = self._first.runs[idx](seen[span])
            if self._activate is not None:
                inner = self._activate(inner)
            output = self._down.runs[idx](inner)
            if self._norm is not None:
                output = self._norm(output)
            total.index_add_(0, rows[span], output.float().mul_(factors[span]))
        return total.to(x.dtype)


def _gate_of(module: Any) -> Activation | None:
    """Return the activation of a backend's gated layer that computes what the module's own gate computes; else None.

    The module's gate is tried: its code says nothing about clamps, factors or the order of gate and up.
    """
    gate = torch.linspace(-40, 40, 81)
    up = gate.flip(0) + 0.5
    try:
        result = module._apply_gate(torch.cat([gate, up])[None])
    except RuntimeError:  # it has weights, which are not loaded yet
        return None
    if result.device.type == "meta":
        return None
    wanted: dict[Activation, Tensor] = {
        "silu": functional.silu(gate) * up,
        "gelu_tanh": functional.gelu(gate, approximate="tanh") * up,
    }
    return next((name for name, values in wanted.items() if torch.allclose(result[0], values, 1e-5, 1e-6)), None)
