"""Norms of all query heads of a row together, and of all its key heads together, also where ranks share the heads."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.distributed.rank_group import RankGroup
from quire.models.modules.norms import scale_slot, unit_scale
from quire.models.modules.weight_slots import WeightSlots
from quire.models.specs import spec
from quire.ops.interface.ops import Ops


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
