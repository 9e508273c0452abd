"""Linear layers of blocks, and how the output of a block is added to the residual."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from quire.distributed.rank_group import RankGroup
from quire.models.modules.norms import LearnedNorm
from quire.models.modules.weight_slots import AdaptedRows, WeightSlot, WeightSlots, nested
from quire.ops.interface.adapted_linear import AdaptedLinear
from quire.ops.interface.ops import Linear, Ops
from quire.ops.interface.quantized_weight import StoredWeight

# Slices of the inputs of a block's last projection, over all ranks: up to so many ranks give the same bits.
SUM_SLICES: Final = 4


class Projection:
    """A linear layer, packed as soon as its weight and bias are loaded."""

    __slots__ = ("_pack", "_parts", "run", "slots")

    run: Linear

    def __init__(self, in_width: int, out_width: int, has_bias: bool, ops: Ops, **options: Any) -> None:
        fill = partial(self._fill, "weight")
        self.slots: WeightSlots = {
            "weight": WeightSlot((out_width, in_width), fill, fill, adapted=(AdaptedRows(self),))
        }
        if has_bias:
            self.slots["bias"] = WeightSlot((out_width,), partial(self._fill, "bias"))
        self._pack: Callable[..., Linear] = partial(ops.pack_linear, **options)
        self._parts: dict[str, Tensor | StoredWeight] = {}

    def _fill(self, name: str, tensor: Tensor | StoredWeight) -> None:
        # A bias comes later, and until then the weight is kept.
        if len(self.slots) > 1 and isinstance(tensor, Tensor):
            tensor = tensor.clone()
        self._parts[name] = tensor
        if len(self._parts) == len(self.slots):
            self.run = self._pack(**self._parts)
            self._parts = {}  # drops the unpacked weight

    @property
    def is_adapted(self) -> bool:
        """True if an adapter of the current step applies to the layer."""
        return isinstance(self.run, AdaptedLinear) and self.run.is_active


class ResidualAdd(NamedTuple):
    """The addition of the output of a mixer or an FFN to the residual.

    Args:
        norm: norm of the output, or None.
        scale: factor of the output, after the norm.
        ranks: ranks whose outputs are summed before the norm; None if the output is complete.
    """

    norm: LearnedNorm | None = None
    scale: float = 1.0
    ranks: RankGroup | None = None

    @property
    def is_plain(self) -> bool:
        """True without a norm and a scale."""
        return self.norm is None and self.scale == 1.0

    def __call__(self, y: Tensor, residual: Tensor) -> Tensor:
        """Add the output `y` [T, E] to `residual` [T, E]."""
        if self.ranks is not None:
            if self.is_plain:
                return self.ranks.all_reduce(y, residual)
            y = self.ranks.all_reduce(y)
        return torch.add(residual, y if self.norm is None else self.norm(y), alpha=self.scale)


class ResidualProjection:
    """The last projection of a mixer or an FFN, and the addition of its result to the residual."""

    __slots__ = ("_addition", "_is_plain", "_projection", "slots")

    def __init__(
        self, in_width: int, out_width: int, has_bias: bool, addition: ResidualAdd, ops: Ops, **options: Any
    ) -> None:
        num_slices = max(1, SUM_SLICES // (1 if addition.ranks is None else addition.ranks.size))
        self._projection = Projection(in_width, out_width, has_bias, ops, num_slices=num_slices, **options)
        self._addition, self._is_plain = addition, addition.is_plain
        self.slots: WeightSlots = self._projection.slots
        if addition.norm is not None:
            self.slots = self.slots | nested(norm=addition.norm.slots)

    @property
    def plain(self) -> Linear | None:
        """The projection if its result is added without a norm and a scale, else None."""
        return self._projection.run if self._is_plain else None

    @property
    def is_adapted(self) -> bool:
        """See `Projection`."""
        return self._projection.is_adapted

    def __call__(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return the projection of `x` [T, in], added to `residual` [T, out] if there is one."""
        ranks = self._addition.ranks
        if ranks is None and (residual is None or self._is_plain):
            return self._projection.run(x, residual)
        product = self._projection.run(x)
        if residual is None:
            return product if ranks is None else ranks.all_reduce(product)
        return self._addition(product, residual)
