"""The slots that a checkpoint's weights are loaded into."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.quantized_weight import StoredWeight


class WeightSlot(NamedTuple):
    """The destination of a weight.

    Args:
        shape: shape of the tensor that `fill` takes.
        fill: function that is called once with the tensor, which may lie in a file: what is kept of it is copied.
        fill_stored: the same for a weight that is stored quantised; None where a tensor is needed.
        dtype: dtype of the tensor; None for the model's.
    """

    shape: tuple[int, ...]
    fill: Callable[[Tensor], object]
    fill_stored: Callable[[StoredWeight], object] | None = None
    dtype: torch.dtype | None = None


# Name of a weight within its block -> where it goes.
WeightSlots = dict[str, WeightSlot]


def nested(**parts: WeightSlots) -> WeightSlots:
    """Join the slots of parts, each under its part's name."""
    return {f"{part}.{name}": slot for part, slots in parts.items() for name, slot in slots.items()}
