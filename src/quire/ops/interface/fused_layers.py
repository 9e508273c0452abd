"""Descriptions of layers and experts with packed weights, for backends that run them as one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from quire.ops.interface.adapted_experts import ExpertAdapters
from quire.ops.interface.ops import AttentionBatch, HeadNorms, Linear, PagedKV, PagedStates, Rotation, StateBatch
from quire.ops.interface.recurrent_weights import GatedDeltaNetWeights, ShortConvWeights
from quire.ops.interface.shared_ranks import SharedMemoryRanks


class RowNorm(NamedTuple):
    """A norm of hidden states.

    Args:
        scales: [E], of a dtype that `Ops.rms_norm` takes.
        eps: added to the mean square.
    """

    scales: Tensor
    eps: float


class PackedAttention(NamedTuple):
    """Attention whose output is added to the residual unchanged.

    Args:
        qkv: projection to queries, keys and values.
        output: projection of the attention output.
        head_norms: norms of the heads; None if the model has none.
        num_heads: H.
        score_scale: factor of the scores before the softmax.
        sinks: attention sinks, [H] of float32; None for none.
        gate: projection to gates, whose sigmoids multiply the output of attention; None without gates.
        soft_cap: see `StepAttention.attend`.
    """

    qkv: Linear
    output: Linear
    head_norms: HeadNorms | None
    num_heads: int
    score_scale: float
    sinks: Tensor | None = None
    gate: Linear | None = None
    soft_cap: float | None = None


class PackedRecurrence(NamedTuple):
    """A recurrent mixer whose output is added to the residual unchanged.

    Args:
        input: projection to the mixer's inputs.
        output: projection of the mixer's output.
        weights: the other weights; their type is the kind of mixer.
    """

    input: Linear
    output: Linear
    weights: ShortConvWeights | GatedDeltaNetWeights


class PackedMLP(NamedTuple):
    """A gated MLP whose output is added to the residual unchanged.

    Args:
        gate_up: projection to the gated columns.
        down: projection of the gated columns.
    """

    gate_up: Linear
    down: Linear


class RoutedExperts(NamedTuple):
    """The experts of a layer, with their router; see `models.specs.spec.Experts` for fields without a description.

    Args:
        router: projection to logits.
        gate_ups, downs: layers of each expert of this rank, `gate_ups` gated; of equal shapes.
        choice_bias, expert_scales: [X] of float32; None if the model has none.
        is_sigmoid: scores are sigmoids of logits, not their softmax.
        shared: layers of the shared expert, or None.
        shared_gate: projection to the gate of the shared expert's output, [T, 1], or None.
        num_experts: X, including the experts of other ranks.
        first_expert: index of the first expert of this rank; the outputs of other ranks' experts are not included.
        adapters: adapters of `gate_ups` and of `downs`; None if adapters are not supported.
    """

    router: Linear
    gate_ups: Sequence[Linear]
    downs: Sequence[Linear]
    num_chosen: int
    choice_bias: Tensor | None
    expert_scales: Tensor | None
    is_sigmoid: bool
    renormalised: bool
    scaled_input: bool
    sum_eps: float
    score_scale: float
    logit_scale: float
    shared: PackedMLP | None
    shared_gate: Linear | None
    num_experts: int
    first_expert: int = 0
    adapters: tuple[ExpertAdapters, ExpertAdapters] | None = None


class PackedLayer(NamedTuple):
    """A layer with packed weights.

    Args:
        mixer_norm: norm before the mixer.
        mixer: the mixer.
        group_idx: index of its cache group.
        layer_idx: index of the layer in that group.
        rotation_idx: index of attention's rotation in the rotations of a step; 0 for other mixers.
        ffn_norm: norm before the feed-forward part.
        ffn: gated MLP, or experts.
    """

    mixer_norm: RowNorm
    mixer: PackedAttention | PackedRecurrence
    group_idx: int
    layer_idx: int
    rotation_idx: int
    ffn_norm: RowNorm
    ffn: PackedMLP | RoutedExperts


class FusedLayers(Protocol):
    """The layers of a model, run by one call of a step."""

    def __call__(
        self,
        x: Tensor,
        rotations: Sequence[Rotation],
        groups: Sequence[AttentionBatch | StateBatch],
        storages: Sequence[PagedKV | PagedStates],
        /,
    ) -> Tensor | None:
        """Run the layers; keys, values and states are stored.

        Args:
            x: [T, E], contiguous.
            rotations: rotations of the rows.
            groups: the step's part in each cache group.
            storages: storage of each cache group.

        Returns:
            [T, E], bit-identical to the layers run one by one; None, with nothing stored, for a step that the kernels
            do not support or do not speed up.
        """


@runtime_checkable
class FusesLayers(Protocol):
    """A backend that runs the layers of a model by one call, and the final norm with the output head by another."""

    def fuse_layers(
        self, layers: Sequence[PackedLayer], ranks: SharedMemoryRanks | None = None, /
    ) -> FusedLayers | None:
        """Return the fused layers; None if the backend lacks a fused kernel for some of their parts.

        Args:
            layers: layers with their weights.
            ranks: ranks that all-reduce the output of each half of a layer; None if this rank has whole layers.
        """

    def fuse_norm(self, norm: RowNorm, linear: Linear) -> Callable[[Tensor], Tensor] | None:
        """Return a norm and a linear layer as one call, [R, E] to [R, out], with the same bits; None as above."""


class FusedExperts(Protocol):
    """The experts of a layer, run by one call."""

    def __call__(self, x: Tensor, routed: Tensor, start: Tensor | None, /) -> Tensor:
        """Return the weighted sum of the outputs of each row's experts, added in float32, in a fixed order.

        Args:
            x: [T, E], contiguous; input of the experts.
            routed: [T, E], contiguous; input of the router.
            start: [T, E], contiguous, which the sum is added to; None for zeros.

        Returns:
            [T, E]; a row gets the same bits in every batch.
        """


@runtime_checkable
class FusesExperts(Protocol):
    """A backend that runs the experts of a layer by one call."""

    def fuse_experts(self, experts: RoutedExperts) -> FusedExperts | None:
        """Return the fused experts; None if the backend lacks a fused kernel for some of their matmuls."""
