"""The block of an FFN that is many experts, of which each token goes through a few."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from quire.models import spec
from quire.models.blocks import GatedMLPBlock
from quire.models.projections import Projection, ResidualAdd
from quire.models.weight_slots import WeightSlot, WeightSlots, nested
from quire.ops.interface import Activation, Linear, Ops
from quire.ops.quantized_weight import StoredWeight


class ExpertsBlock:
    """Experts with a router.

    Rows are brought together by expert: an expert that any row goes through costs two products, the others none.

    Args:
        experts: their number and widths, and how they are chosen and scored.
        width: E.

    Attributes:
        slots: "router", "gate_up", "down" and, where there is a shared expert, "shared.gate_up" and "shared.down".
    """

    def __init__(self, experts: spec.Experts, width: int, ops: Ops) -> None:
        self._experts = experts
        self._router = Projection(width, experts.num_experts, False, ops, min_bits=8)
        self._gate_up = ExpertProjections(experts, width, 2 * experts.width, ops, gate=experts.activation)
        self._down = ExpertProjections(experts, experts.width, width, ops)
        self.slots: WeightSlots = nested(router=self._router.slots, gate_up=self._gate_up.slots, down=self._down.slots)
        self._shared: GatedMLPBlock | None = None
        if experts.shared_width:
            shared = spec.GatedMLP(experts.shared_width, activation=experts.activation)
            self._shared = GatedMLPBlock(shared, width, ResidualAdd(), ops)
            self.slots |= nested(shared=self._shared.slots)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add to `residual` [T, E] what the experts of each row make of `x` [T, E]."""
        experts = self._experts
        chosen, scores = choose(self._router.run(x), experts)
        if self._shared is not None:
            residual = self._shared(x, residual)
        order = chosen.flatten().argsort(stable=True)
        rows, weights = order // experts.num_chosen, scores.flatten()[order][:, None]
        seen = x[rows]
        if experts.scaled_input:
            seen.mul_(weights)
        counts = torch.bincount(chosen.flatten(), minlength=experts.num_experts).tolist()
        # In float32 and always in the order of the experts: a row gets the same, whatever rows are beside it.
        total = residual.to(torch.float32, copy=True)
        for idx, (start, end) in enumerate(pairwise(accumulate(counts, initial=0))):
            if start == end:
                continue
            given = self._down.runs[idx](self._gate_up.runs[idx](seen[start:end])).float()
            if not experts.scaled_input:
                given.mul_(weights[start:end])
            total.index_add_(0, rows[start:end], given)
        return total.to(x.dtype)


class ExpertProjections:
    """A linear layer of each expert, packed as soon as the weight of all is there.

    Args:
        in_width, out_width: widths of each expert.
        gate: see `Ops.pack_linear`.

    Attributes:
        runs: the packed layers, one for each expert.
        slots: "weight".
    """

    __slots__ = ("_is_transposed", "_pack", "_shape", "runs", "slots")

    runs: list[Linear]

    def __init__(
        self, experts: spec.Experts, in_width: int, out_width: int, ops: Ops, gate: Activation | None = None
    ) -> None:
        self._pack = partial(ops.pack_linear, gate=gate)
        self._is_transposed = experts.transposed
        self._shape = experts.num_experts, out_width, in_width
        shape: tuple[int, ...] = (experts.num_experts * out_width, in_width)
        if experts.transposed:
            shape = (experts.num_experts, in_width, out_width)
        fill_stored = None if experts.transposed else self._fill_stored
        self.slots: WeightSlots = {"weight": WeightSlot(shape, self._fill, fill_stored)}

    def _fill(self, tensor: Tensor) -> None:
        weights = tensor.mT if self._is_transposed else tensor.view(self._shape)
        self.runs = [self._pack(weight) for weight in weights]

    def _fill_stored(self, weight: StoredWeight) -> None:
        num_experts, out_width, _ = self._shape
        self.runs = [
            self._pack(weight.rows(slice(idx * out_width, (idx + 1) * out_width))) for idx in range(num_experts)
        ]


def choose(logits: Tensor, experts: spec.Experts) -> tuple[Tensor, Tensor]:
    """Return the experts of each row and their scores, [T, C] of int64 and of float32.

    Args:
        logits: [T, X]; the scores grow with them, so the highest are chosen before anything is rounded again.
    """
    logits = logits.float()
    top, chosen = logits.topk(experts.num_chosen, -1)
    scores = top.sigmoid() if experts.scoring == "sigmoid" else (top - logits.logsumexp(-1, keepdim=True)).exp()
    if experts.renormalised:
        scores /= scores.sum(-1, keepdim=True)
    return chosen, scores
