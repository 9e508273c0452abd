"""Norms with a learned scale, of all kinds that a specification names."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.models.modules.weight_slots import WeightSlot, WeightSlots
from quire.models.specs import spec
from quire.models.specs.norm_spec import LayerNorm, RMSNorm
from quire.ops.interface.fused_layers import RowNorm
from quire.ops.interface.ops import Ops


class Norm:
    """Root mean square norm with a learned scale."""

    __slots__ = ("_eps", "_rms_norm", "_scale", "slots")

    def __init__(self, norm: spec.RMSNorm, width: int, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self._eps = norm.eps
        self._rms_norm = ops.rms_norm
        self._scale = unit_scale(norm, (width,), dtype, device)
        self.slots: WeightSlots = {"weight": scale_slot(norm, self._scale, (width,))}

    @property
    def row_norm(self) -> RowNorm:
        """Scales and epsilon."""
        return RowNorm(self._scale, self._eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise [T, E]."""
        return self._rms_norm(x, self._scale, self._eps)


class CentredNorm:
    """Layer norm: the mean is subtracted, and the rest divided by its standard deviation."""

    __slots__ = ("_bias", "_eps", "_layer_norm", "_scale", "slots")

    def __init__(self, norm: LayerNorm, width: int, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self._eps = norm.eps
        self._layer_norm = ops.layer_norm
        self._scale = torch.ones(width, dtype=dtype, device=device)
        self._bias = torch.zeros(width, dtype=dtype, device=device) if norm.bias else None
        self.slots: WeightSlots = {"weight": WeightSlot((width,), self._scale.copy_)}
        if self._bias is not None:
            self.slots["bias"] = WeightSlot((width,), self._bias.copy_)

    @property
    def row_norm(self) -> None:
        """None: fused kernels have root mean square norms alone."""
        return None

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise [T, E]."""
        return self._layer_norm(x, self._scale, self._bias, self._eps)


class NoNorm:
    """The norm of a model without one at some place: it changes nothing."""

    __slots__ = ("slots",)

    def __init__(self) -> None:
        self.slots: WeightSlots = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x


LearnedNorm = Norm | CentredNorm
AnyNorm = LearnedNorm | NoNorm


def make_learned_norm(
    norm: LayerNorm | RMSNorm, width: int, ops: Ops, dtype: torch.dtype, device: torch.device
) -> LearnedNorm:
    """Return the norm that a specification names."""
    if isinstance(norm, RMSNorm):
        return Norm(norm, width, ops, dtype, device)
    return CentredNorm(norm, width, ops, dtype, device)


def make_norm(
    norm: LayerNorm | RMSNorm | None, width: int, ops: Ops, dtype: torch.dtype, device: torch.device
) -> AnyNorm:
    """Return the norm that a specification names, or one that changes nothing."""
    return NoNorm() if norm is None else make_learned_norm(norm, width, ops, dtype, device)


def unit_scale(norm: spec.RMSNorm, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return scales of ones: float32 if 1 is added to the weight or the norm is `wide`, else the model's dtype."""
    return torch.ones(shape, dtype=torch.float32 if norm.zero_centred or norm.wide else dtype, device=device)


def scale_slot(norm: spec.RMSNorm, scale: Tensor, shape: tuple[int, ...], order: Tensor | None = None) -> WeightSlot:
    """Return the slot of a norm's weight of `shape`, which fills its scale, reordered by `order` if one is given."""

    def fill(weight: Tensor) -> None:
        scale.copy_(weight if order is None else weight[order])
        if norm.zero_centred:
            scale.add_(1.0)

    return WeightSlot(shape, fill)
