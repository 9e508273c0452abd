"""The slots of the weights of a transformers module, whose linear layers and experts become packed ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quire.models.checkpoints.tensor_reader import WEIGHT
from quire.models.hosted.experts import HostedExperts, runs_registered_experts
from quire.models.hosted.linear import (
    HostedEmbedding,
    HostedLinear,
    LayerUse,
    is_packable,
    is_transposed,
    make_projection,
)
from quire.models.hosted.readings import Reading
from quire.models.modules.projections import Projection
from quire.models.modules.weight_slots import WeightSlot, WeightSlots
from quire.ops.interface.ops import KeepsRows, Ops
from quire.ops.interface.quantized_weight import StoredWeight

# Names of tensors of a module that have one value; it is read by the first name.
Tied = tuple[str, ...]


class ModuleSlots:
    """The slots of a module's tensors.

    Args:
        module: the module; its layers are replaced here.
        groups: names of its tensors.
        readings: the stored tensors.
        dtypes: dtype of each tensor; layers whose weights are of another dtype than `dtype` are not packed.
        ops, dtype, use: see `fill`.

    Attributes:
        slots: slot of each value, by its first name.
    """

    def __init__(
        self,
        module: Any,
        groups: Sequence[Tied],
        readings: Mapping[str, Reading],
        dtypes: Mapping[str, torch.dtype],
        *,
        ops: Ops,
        dtype: torch.dtype,
        use: LayerUse,
    ) -> None:
        self._module, self._readings, self._use = module, readings, use
        self._ops, self._dtype = ops, dtype
        self._layers: dict[str, nn.Module] = dict(module.named_modules())
        self._head = module.get_output_embeddings()
        self._packed: dict[str, Projection] = {}
        of_dtype = [names for names in groups if dtypes[names[0]] is dtype]
        self._own = {names[0] for names in of_dtype if len(names) == 1}
        self._shared = {name for names in of_dtype if len(names) > 1 for name in names}
        self.slots: WeightSlots = {}
        for name, layer in self._layers.items():
            if runs_registered_experts(layer) and all(dtypes[f"{name}.{own}"] is dtype for own in layer._parameters):
                turned = [own for own in layer._parameters if is_turned(layer, readings[f"{name}.{own}"])]
                packed = HostedExperts(layer, ops, turned)
                self.slots |= {f"{name}.{own}": slot for own, slot in packed.slots.items()}
        # Tied values last: the head is whole by then, and rows are read from it.
        for names in sorted(groups, key=lambda names: len(names) > 1):
            if names[0] not in self.slots:
                self.slots[names[0]] = self._slot(names)._replace(dtype=dtypes[names[0]])

    def _slot(self, names: Tied) -> WeightSlot:
        name = next((name for name in names if self._can_pack(name.rpartition(".")[0])), None)
        if name is None:
            reading = self._readings[names[0]]
            is_other = is_turned(self._owner(names[0]), reading)
            return WeightSlot(reading.shape, partial(self._set_turned if is_other else self._set, names))
        layer, _, kind = name.rpartition(".")
        projection = self._projection(layer)
        if len(names) > 1:
            tied = partial(self._fill_tied, projection, tuple(other for other in names if other != name))
            return WeightSlot(self._readings[names[0]].shape, tied, tied)
        slot = projection.slots[kind]
        if layer not in self._use.adapted or self._layers[layer] is self._head:
            slot = slot._replace(adapted=())
        is_stored_so = not is_turned(self._layers[layer], self._readings[name])
        if kind == "weight" and is_transposed(self._layers[layer]) and is_stored_so:
            return slot._replace(shape=slot.shape[::-1], fill=partial(_fill_transposed, slot))
        return slot

    def _can_pack(self, name: str) -> bool:
        """Return whether a layer is a linear layer that can be packed; a tied weight only if it is the head's."""
        layer = self._layers[name]
        if not is_packable(layer) or name in self._use.kept:
            return False
        parts = [f"{name}.{kind}" for kind, tensor in layer._parameters.items() if tensor is not None]
        can_share = {f"{name}{WEIGHT}"} if layer is self._head else set()
        return all(part in self._own or part in can_share & self._shared for part in parts)

    def _projection(self, name: str) -> Projection:
        """Return the packed layer that replaces a linear layer."""
        if name not in self._packed:
            layer = self._layers[name]
            is_head = layer is self._head
            made = make_projection(layer, self._ops, is_head=is_head)
            self._packed[name] = made
            self._module.set_submodule(name, HostedLinear(made, self._dtype, is_head=is_head))
        return self._packed[name]

    def _fill_tied(self, head: Projection, names: Sequence[str], value: Tensor | StoredWeight) -> None:
        """Take a weight of the head and of the embedding: one packed copy for both if rows can be read from it."""
        slot = head.slots["weight"]
        if isinstance(value, StoredWeight):
            assert slot.fill_stored is not None, "linear layers take stored weights"
            slot.fill_stored(value)
        else:
            slot.fill(value)
        others = []
        for name in names:
            layer = name.removesuffix(WEIGHT)
            is_plain = type(self._layers.get(layer)) is nn.Embedding and layer not in self._use.kept
            if is_plain and isinstance(head.run, KeepsRows):
                self._module.set_submodule(layer, HostedEmbedding(head.run.rows, value.shape[1]))
            else:
                others.append(name)
        self._set(others, value.dequantize() if isinstance(value, StoredWeight) else value)

    def _set_turned(self, names: Sequence[str], tensor: Tensor) -> None:
        """Set a parameter whose values come as [..., out, in], and which the module has as [..., in, out]."""
        self._set(names, tensor.mT)

    def _set(self, names: Sequence[str], tensor: Tensor) -> None:
        """Set a parameter or a buffer under all its names."""
        value: Tensor = tensor.clone()
        if any(name.rpartition(".")[2] in self._owner(name)._parameters for name in names):
            value = nn.Parameter(value, requires_grad=False)
        for name in names:
            setattr(self._owner(name), name.rpartition(".")[2], value)

    def _owner(self, name: str) -> nn.Module:
        return self._layers[name.rpartition(".")[0]]


def is_turned(owner: nn.Module, reading: Reading) -> bool:
    """Return whether a tensor is [..., in, out] in its module and [..., out, in] as stored: codes always are."""
    return reading.is_quantized and (is_transposed(owner) or bool(getattr(owner, "is_transposed", False)))


def _fill_transposed(slot: WeightSlot, tensor: Tensor) -> None:
    slot.fill(tensor.mT.contiguous())
