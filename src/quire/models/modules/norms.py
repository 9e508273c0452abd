"""Norms with a learned scale, of all kinds that a specification names."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.distributed.rank_group import RankGroup
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


class JointNorms:
    """Norms of all query heads of a row together, and of all its key heads together.

    If ranks share the heads, they add their mean squares: each has as many heads of a kind as the others, and of a head
    that several have, all have the same values.

    Args:
        heads: numbers of query heads and of KV heads of this rank, and values of a head.
        order: order of a head's values in memory; None for the stored one.
    """

    __slots__ = ("_eps", "_ranks", "_rms_norm", "_scales", "slots")

    def __init__(
        self,
        norm: spec.RMSNorm,
        heads: tuple[int, int, int],
        order: Tensor | None,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        ranks: RankGroup | None,
    ) -> None:
        *counts, head_dim = heads
        self._eps, self._ranks, self._rms_norm = norm.eps, ranks, ops.rms_norm
        self._scales = [unit_scale(norm, (count * head_dim,), dtype, device) for count in counts]
        self.slots: WeightSlots = {}
        for name, scale in zip(("q_norm", "k_norm"), self._scales, strict=True):
            whole = None if order is None else torch.arange(len(scale)).view(-1, head_dim)[:, order].flatten()
            self.slots[f"{name}.weight"] = scale_slot(norm, scale, tuple(scale.shape), whole)

    def __call__(self, qkv: Tensor) -> None:
        """Normalise queries and keys of `qkv` [T, (H + 2 K) D] in place."""
        num_queries, num_keys = (len(scale) for scale in self._scales)
        parts = qkv.tensor_split((num_queries, num_queries + num_keys), 1)[:2]
        if self._ranks is None:
            for part, scale in zip(parts, self._scales, strict=True):
                part.copy_(self._rms_norm(part, scale, self._eps))
            return
        squares = torch.stack([part.float().square().mean(1) for part in parts])
        factors = (self._ranks.all_reduce(squares) / self._ranks.size + self._eps).rsqrt_()
        for part, scale, factor in zip(parts, self._scales, factors, strict=True):
            part.copy_((part * factor[:, None]).to(scale.dtype) * scale)


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
