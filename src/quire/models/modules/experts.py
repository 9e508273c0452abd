"""Mixture-of-experts block: a router sends each token to a few experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from quire.models.modules.blocks import GatedMLPBlock, PlainMLPBlock
from quire.models.modules.norms import LearnedNorm
from quire.models.modules.projections import Projection, ResidualAdd
from quire.models.modules.weight_slots import WeightSlot, WeightSlots, nested
from quire.models.specs import spec
from quire.models.specs.parameter_counts import DOWN_GROUP
from quire.ops.interface.adapted_experts import ExpertAdapters, ExpertPairs, group_pairs
from quire.ops.interface.adapted_linear import StepAdapters
from quire.ops.interface.fused_layers import FusedExperts, FusesExperts, RoutedExperts
from quire.ops.interface.lora import LoraRows
from quire.ops.interface.ops import Activation, Linear, Ops
from quire.ops.interface.quantized_weight import StoredWeight


class ExpertsBlock:
    """Experts with a router.

    Rows are grouped by expert: an expert with rows costs two matmuls, the others none. If experts are divided among
    ranks, each rank routes over all experts and computes its own.
    """

    def __init__(
        self,
        experts: spec.Experts,
        width: int,
        addition: ResidualAdd,
        ops: Ops,
        new_norm: Callable[[spec.RMSNorm], LearnedNorm],
    ) -> None:
        self._experts, self._addition = experts, addition
        self._router = Projection(width, experts.num_experts, experts.bias, ops, min_bits=8)
        gate = experts.activation if experts.plain is None else None
        self._gate_up = ExpertProjections(experts, width, experts.gate_up_width, ops, gate=gate)
        self._activate = None if experts.plain is None else partial(ops.activate, activation=experts.plain)
        self._down = ExpertProjections(experts, experts.width, width, ops, max_group=DOWN_GROUP)
        self._first, self._end = experts.bounds
        self.slots: WeightSlots = nested(router=self._router.slots, gate_up=self._gate_up.slots, down=self._down.slots)
        self._router_norm: LearnedNorm | None = None
        if experts.router_norm is not None:
            self._router_norm = new_norm(experts.router_norm)
            self.slots |= nested(router_norm=self._router_norm.slots)
        self._choice_bias = self._expert_scales = None
        for name in ("choice_bias", "expert_scales"):
            if getattr(experts, name):
                fill = partial(self._fill, f"_{name}")
                self.slots[f"{name}.weight"] = WeightSlot((experts.num_experts,), fill, dtype=torch.float32)
        self.fused: FusedExperts | None = None
        self.fused_adapted: FusedExperts | None = None
        self._shared: GatedMLPBlock | PlainMLPBlock | None = None
        self._shared_gate: Projection | None = None
        if experts.shared is not None:
            self._shared = make_mlp(experts.shared, width, ResidualAdd(), ops)
            self.slots |= nested(shared=self._shared.slots)
            if experts.shared_gate:
                self._shared_gate = Projection(width, 1, False, ops, min_bits=8)
                self.slots |= nested(shared=nested(gate=self._shared_gate.slots))

    def _fill(self, name: str, tensor: Tensor) -> None:
        setattr(self, name, tensor.clone())

    def fuse(self, ops: FusesExperts) -> None:
        """Ask `ops` for fused experts, once all weights are loaded."""
        routed = self._routed
        self.fused = None if routed is None else ops.fuse_experts(routed)

    def fuse_adapted(self, ops: FusesExperts) -> None:
        """Ask `ops` for fused experts with adapters, once the layers take adapters."""
        routed = self._routed
        self.fused_adapted = None if routed is None else ops.fuse_experts(routed)

    @property
    def packed(self) -> RoutedExperts | None:
        """Weights for the fused kernels; None if the block has parts that they lack."""
        return self._routed if self._addition.is_plain and self._router_norm is None else None

    @property
    def _routed(self) -> RoutedExperts | None:
        """Weights for the calls that fuse experts, which are gated; None for plain ones."""
        if self._activate is not None:
            return None
        experts, shared = self._experts, None if self._shared is None else self._shared.packed
        gate_up, down = self._gate_up.adapters, self._down.adapters
        assert self._shared is None or shared is not None, "a shared expert is added as it is"
        return RoutedExperts(
            self._router.run,
            self._gate_up.runs,
            self._down.runs,
            experts.num_chosen,
            self._choice_bias,
            self._expert_scales,
            experts.scoring == "sigmoid",
            experts.renormalised,
            experts.scaled_input,
            experts.sum_eps,
            experts.score_scale,
            experts.logit_scale,
            shared,
            None if self._shared_gate is None else self._shared_gate.run,
            experts.num_experts,
            self._first,
            None if gate_up is None or down is None else (gate_up, down),
        )

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add the experts' output for `x` [T, E] to `residual` [T, E]."""
        if self._addition == ResidualAdd():  # experts add to it by themselves
            return self.mix(x, residual)
        return self._addition(self.mix(x), residual)

    def mix(self, x: Tensor, start: Tensor | None = None, routed: Tensor | None = None) -> Tensor:
        """Return the experts' output for `x` [T, E], added to `start`; the router reads `routed`, `x` by default."""
        experts, routed = self._experts, x if routed is None else routed
        if self._router_norm is not None:
            routed = self._router_norm(routed)
        adapted = self._gate_up.adapted_rows(len(x)) or self._down.adapted_rows(len(x))
        fused = self.fused if adapted is None and not self._is_adapted else self.fused_adapted
        if fused is not None:
            return fused(x, routed, start)
        chosen, scores = choose(self._router.run(routed), experts, self._choice_bias, self._expert_scales)
        # In float32 and always in the order of the experts: a row's result does not depend on the other rows.
        total = self._begin(x, start)
        pairs = group_pairs(chosen, experts.bounds, experts.num_experts, adapted)
        rows, weights = pairs.places // experts.num_chosen, scores.flatten()[pairs.places][:, None]
        seen = x[rows]
        if experts.scaled_input:
            seen.mul_(weights)
        for span, product in self._products(seen, pairs):
            weighted = product.float()
            if not experts.scaled_input:
                weighted.mul_(weights[span])
            total.index_add_(0, rows[span], weighted)
        return total.to(x.dtype)

    def _products(self, seen: Tensor, pairs: ExpertPairs) -> Iterator[tuple[slice, Tensor]]:
        """Yield each expert's range of pairs and its output for them.

        The output of adapters is computed for all experts together, before the experts' matmuls.
        """
        gate_up, down = self._gate_up, self._down
        if pairs.adapted is None:
            for idx, span in pairs.spans:
                inner = gate_up.runs[idx](seen[span])
                yield span, down.runs[idx](inner if self._activate is None else self._activate(inner))
            return
        added = gate_up.added(seen, pairs.adapted)
        assert self._activate is None, "plain experts take no adapters"
        inner = torch.cat([gate_up.run(idx, seen, span, added) for idx, span in pairs.spans])
        added = down.added(inner, pairs.adapted)
        for idx, span in pairs.spans:
            yield span, down.run(idx, inner, span, added)

    @property
    def _is_adapted(self) -> bool:
        """True if an adapter of the current step applies to the router or to the shared expert."""
        dense = (self._router, self._shared, self._shared_gate)
        return any(part is not None and part.is_adapted for part in dense)

    def _begin(self, x: Tensor, start: Tensor | None) -> Tensor:
        """Return the sum that experts add to, in float32: `start` and the shared expert's output for `x`."""
        shared, gate = self._shared, self._shared_gate
        if shared is not None and gate is None:
            return shared(x, start).float()
        total = torch.zeros_like(x, dtype=torch.float32) if start is None else start.to(torch.float32, copy=True)
        if shared is not None and gate is not None:
            total.addcmul_(gate.run(x).float().sigmoid_(), shared(x, None).float())
        return total


class MLPBesideExpertsBlock:
    """A gated MLP and experts side by side, with a norm after each."""

    packed = None

    def __init__(
        self,
        ffn: spec.MLPBesideExperts,
        width: int,
        addition: ResidualAdd,
        ops: Ops,
        new_norm: Callable[[spec.RMSNorm], LearnedNorm],
    ) -> None:
        # Both outputs are whole before their norms.
        self._addition, self._ranks = addition._replace(ranks=None), addition.ranks
        self._mlp = GatedMLPBlock(ffn.mlp, width, ResidualAdd(ranks=addition.ranks), ops)
        self._experts = ExpertsBlock(ffn.experts, width, ResidualAdd(), ops, new_norm)
        self._mlp_norm, self._experts_input_norm, self._experts_norm = (new_norm(ffn.norm) for _ in range(3))
        self.fuse, self.fuse_adapted = self._experts.fuse, self._experts.fuse_adapted
        self.slots: WeightSlots = nested(
            mlp=self._mlp.slots,
            mlp_norm=self._mlp_norm.slots,
            experts_input_norm=self._experts_input_norm.slots,
            experts=self._experts.slots,
            experts_norm=self._experts_norm.slots,
        )
        if addition.norm is not None:
            self.slots |= nested(norm=addition.norm.slots)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add the MLP's output for `x` [T, E] and the experts' output for `residual` to `residual` [T, E]."""
        dense = self._mlp_norm(self._mlp(x, None))
        mixed = self._experts.mix(self._experts_input_norm(residual), routed=residual)
        sparse = self._experts_norm(mixed if self._ranks is None else self._ranks.all_reduce(mixed))
        return self._addition(dense.add_(sparse), residual)


def make_mlp(
    mlp: spec.GatedMLP | spec.PlainMLP, width: int, addition: ResidualAdd, ops: Ops
) -> GatedMLPBlock | PlainMLPBlock:
    """Make the block of an MLP; for the arguments, see `ExpertsBlock`."""
    if isinstance(mlp, spec.PlainMLP):
        return PlainMLPBlock(mlp, width, addition, ops)
    return GatedMLPBlock(mlp, width, addition, ops)


def make_ffn(
    ffn: spec.FFN, width: int, addition: ResidualAdd, ops: Ops, new_norm: Callable[[spec.RMSNorm], LearnedNorm]
) -> GatedMLPBlock | PlainMLPBlock | ExpertsBlock | MLPBesideExpertsBlock:
    """Make the block of an FFN; for the arguments, see `ExpertsBlock`."""
    match ffn:
        case spec.GatedMLP() | spec.PlainMLP():
            return make_mlp(ffn, width, addition, ops)
        case spec.Experts():
            return ExpertsBlock(ffn, width, addition, ops, new_norm)
        case spec.MLPBesideExperts():
            return MLPBesideExpertsBlock(ffn, width, addition, ops, new_norm)


class ExpertProjections:
    """A linear layer of each expert, packed as soon as the weight of all is there."""

    __slots__ = ("_biases", "_bounds", "_is_transposed", "_order", "_pack", "_shape", "adapters", "runs", "slots")

    runs: list[Linear]

    def __init__(
        self,
        experts: spec.Experts,
        in_width: int,
        out_width: int,
        ops: Ops,
        gate: Activation | None = None,
        max_group: int = 32,
    ) -> None:
        self._pack = partial(ops.pack_linear, gate=gate, max_group=max_group)
        self._is_transposed = experts.transposed
        num_experts, self._bounds = experts.num_local, experts.bounds
        self._shape = num_experts, out_width, in_width
        shape: tuple[int, ...] = (num_experts * out_width, in_width)
        if experts.transposed:
            shape = (num_experts, in_width, out_width)
        # Row of an expert's stored weight for each output; None for all in order.
        self._order: Tensor | None = None
        if gate is not None and experts.interleaved:
            self._order = torch.arange(out_width).view(-1, 2).T.flatten()
        self._biases: Sequence[Tensor | None] = [None] * num_experts
        self.adapters: ExpertAdapters | None = None
        self.slots: WeightSlots = {}
        if experts.bias:
            self.slots["bias"] = WeightSlot((num_experts * out_width,), self._fill_biases)
        fill_stored = None if experts.transposed else self._fill_stored
        self.slots["weight"] = WeightSlot(shape, self._fill, fill_stored, experts=self)

    def adapt(self, ops: Ops, step: StepAdapters) -> ExpertAdapters:
        """Make the layers take adapters, and return their empty slots."""
        self.adapters = ExpertAdapters(ops.make_lora(self._shape[1]), self._bounds, step)
        return self.adapters

    def adapted_rows(self, num_rows: int) -> LoraRows | None:
        """Return the rows with an adapter among a step's `num_rows` rows; None if no adapter applies here."""
        return None if self.adapters is None else self.adapters.rows(num_rows)

    def added(self, x: Tensor, pairs: LoraRows) -> Tensor | None:
        """Return the adapters' output [P, out] for `x` [P, in]; None if no adapter applies."""
        return None if self.adapters is None else self.adapters(x, pairs)

    def run(self, idx: int, x: Tensor, rows: slice, added: Tensor | None) -> Tensor:
        """Return an expert's output for some rows of `x`, plus their rows of `added`."""
        return self.runs[idx](x[rows], None if added is None else added[rows])

    def _fill_biases(self, tensor: Tensor) -> None:
        biases = tensor.view(self._shape[:2])
        self._biases = (biases.clone() if self._order is None else biases[:, self._order]).unbind()

    def _fill(self, tensor: Tensor) -> None:
        weights = tensor.mT if self._is_transposed else tensor.view(self._shape)
        self._pack_all(weight if self._order is None else weight[self._order] for weight in weights)

    def _fill_stored(self, weight: StoredWeight) -> None:
        num_experts, out_width, _ = self._shape
        starts = range(0, num_experts * out_width, out_width)
        self._pack_all(
            weight.rows(slice(start, start + out_width) if self._order is None else start + self._order)
            for start in starts
        )

    def _pack_all(self, weights: Iterable[Tensor | StoredWeight]) -> None:
        assert "bias" not in self.slots or self._biases[0] is not None, "biases come first"
        self.runs = [self._pack(weight, bias) for weight, bias in zip(weights, self._biases, strict=True)]
        self._biases = ()  # the packed layers have them


def choose(
    logits: Tensor, experts: spec.Experts, choice_bias: Tensor | None = None, expert_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the experts of each row and their scores, [T, C] of int64 and of float32."""
    logits = logits.float()
    if experts.logit_scale != 1.0:
        logits *= experts.logit_scale
    if choice_bias is None:
        top, chosen = logits.topk(experts.num_chosen, -1)
        scores = top.sigmoid() if experts.scoring == "sigmoid" else (top - logits.logsumexp(-1, keepdim=True)).exp()
    else:
        all_scores = logits.sigmoid() if experts.scoring == "sigmoid" else logits.softmax(-1)
        chosen = (all_scores + choice_bias).topk(experts.num_chosen, -1).indices
        scores = all_scores.gather(-1, chosen)
    if experts.renormalised:
        scores /= scores.sum(-1, keepdim=True) + experts.sum_eps
    if experts.score_scale != 1.0:
        scores *= experts.score_scale
    return chosen, scores if expert_scales is None else scores * expert_scales[chosen]
