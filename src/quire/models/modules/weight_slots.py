"""The slots that a checkpoint's weights are loaded into, and the table of a model's slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.ops.interface.adapted_experts import ExpertAdapters
from quire.ops.interface.adapted_linear import StepAdapters
from quire.ops.interface.ops import Linear, Ops
from quire.ops.interface.quantized_weight import StoredWeight


class TakesAdapters(Protocol):
    """A linear layer whose weight is in a slot; see `quire.models.modules.projections.Projection`."""

    run: Linear
    slots: WeightSlots


class TakesExpertAdapters(Protocol):
    """The same linear layer of all experts of a layer; see `quire.models.modules.experts.ExpertProjections`."""

    def adapt(self, ops: Ops, step: StepAdapters) -> ExpertAdapters: ...


class AdaptedRows(NamedTuple):
    """The rows of a stored weight, and of its adapters' output, that a linear layer takes.

    Args:
        projection: the layer.
        rows: int64 [out], row of the stored weight for each output; None for all in order.
    """

    projection: TakesAdapters
    rows: Tensor | None = None


class WeightSlot(NamedTuple):
    """The destination of a weight.

    Args:
        shape: shape of the tensor that `fill` takes.
        fill: function that is called once with the tensor, which may be a view of a file: it copies it to keep it.
        fill_stored: the same for a stored quantised weight; None if `fill` needs the dequantised tensor.
        dtype: dtype of the tensor; None for the model's.
        adapted: linear layers made of the weight; empty if they take no adapters.
        experts: layers of experts made of the weight; None if there are none.
    """

    shape: tuple[int, ...]
    fill: Callable[[Tensor], object]
    fill_stored: Callable[[StoredWeight], object] | None = None
    dtype: torch.dtype | None = None
    adapted: tuple[AdaptedRows, ...] = ()
    experts: TakesExpertAdapters | None = None


def reordered(slot: WeightSlot, rows: Tensor) -> WeightSlot:
    """Return the slot of a stored weight, from which `rows` are taken in their order for `slot`."""
    fill_stored = slot.fill_stored
    return slot._replace(
        fill=lambda tensor: slot.fill(tensor[rows]),
        fill_stored=None if fill_stored is None else lambda weight: fill_stored(weight.rows(rows)),
        adapted=tuple(AdaptedRows(entry.projection, rows) for entry in slot.adapted),
    )


# Slot of each weight, by its name within the block.
WeightSlots = dict[str, WeightSlot]


def nested(**parts: WeightSlots) -> WeightSlots:
    """Join the slots of parts, each under its part's name."""
    return {f"{part}.{name}": slot for part, slots in parts.items() for name, slot in slots.items()}


class WeightTable:
    """The slots of a model's weights by name, and the names of weights that are not loaded yet."""

    def __init__(
        self, slots: WeightSlots, dtype: torch.dtype, device: torch.device, on_complete: Callable[[], object]
    ) -> None:
        self.slots = slots
        self._dtype, self._device, self._on_complete = dtype, device, on_complete
        self._missing = dict.fromkeys(slots)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the weights that are not loaded yet."""
        return tuple(self._missing)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight."""
        return {name: slot.shape for name, slot in self.slots.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `load` takes a weight in."""
        return self.slots[name].dtype or self._dtype

    def load(self, name: str, tensor: Tensor | StoredWeight) -> None:
        """Take one weight."""
        slot = self.slots.get(name)
        if slot is None:
            raise CheckpointError(f"the model has no weight {name!r}")
        dtype = self.dtype(name)
        if tuple(tensor.shape) != slot.shape or tensor.dtype != dtype:
            raise CheckpointError(
                f"{name} must be of shape {list(slot.shape)} and {dtype}, got {list(tensor.shape)} and {tensor.dtype}"
            )
        if name not in self._missing:
            raise CheckpointError(f"{name} was loaded before")
        del self._missing[name]
        if isinstance(tensor, StoredWeight) and slot.fill_stored is not None:
            slot.fill_stored(tensor)
        else:
            slot.fill((tensor.dequantize() if isinstance(tensor, StoredWeight) else tensor).to(self._device))
        if not self._missing:
            self._on_complete()
