"""Layers, and the experts of a layer, with packed weights: described for a backend that runs them as one call."""

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
        scales: [E], of a dtype as `Ops.rms_norm` takes it.
        eps: added to the mean square.
    """

    scales: Tensor
    eps: float


class PackedAttention(NamedTuple):
    """Attention whose result is added to the residual as it is.

    Args:
        qkv: projection to queries, keys and values.
        output: projection of what attention gives.
        head_norms: norms of heads, where the model has them.
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
    """A recurrent mixer whose result is added to the residual as it is.

    Args:
        input: projection to the mixer's inputs.
        output: projection of the mixer's output.
        weights: the other weights; their type is the kind of mixer.
    """

    input: Linear
    output: Linear
    weights: ShortConvWeights | GatedDeltaNetWeights


class PackedMLP(NamedTuple):
    """A gated perceptron whose result is added to the residual as it is.

    Args:
        gate_up: projection to gated columns.
        down: projection of these.
    """

    gate_up: Linear
    down: Linear


class RoutedExperts(NamedTuple):
    """The experts of a layer, with their router; fields without a description are those of `models.specs.spec.Experts`.

    Args:
        router: projection to logits.
        gate_ups, downs: the layers of each expert that is here, gated; of equal shapes.
        choice_bias, expert_scales: [X] of float32, where the model has them.
        is_sigmoid: scores are sigmoids of logits, not their softmax.
        shared: layers of the expert that every row goes through, or None.
        shared_gate: projection to the gate of its output, [T, 1], or None.
        num_experts: X, those of other ranks included.
        first_expert: index of the first expert of this rank; the outputs of other ranks' experts are not included.
        adapters: adapters of `gate_ups` and of `downs`; None where adapters are not supported.
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
        rotation_idx: index of the rotation of attention among those of a step; 0 for other mixers.
        ffn_norm: norm before the feed-forward part.
        ffn: gated perceptron, or experts.
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
            [T, E] with the bits that the layers give one by one; None, and nothing is stored, for a step that they
            compute as fast.
        """


@runtime_checkable
class FusesLayers(Protocol):
    """A backend that runs the layers of a model by one call, and its end by another."""

    def fuse_layers(
        self, layers: Sequence[PackedLayer], ranks: SharedMemoryRanks | None = None, /
    ) -> FusedLayers | None:
        """Return the fused layers; None where the backend computes some of their parts otherwise.

        Args:
            layers: layers with their weights.
            ranks: ranks whose outputs of each half are summed; None where those are whole.
        """

    def fuse_norm(self, norm: RowNorm, linear: Linear) -> Callable[[Tensor], Tensor] | None:
        """Return a norm with the product of its result, [R, E] to [R, out], with the same bits; None as above."""


class FusedExperts(Protocol):
    """The experts of a layer, run by one call."""

    def __call__(self, x: Tensor, routed: Tensor, start: Tensor | None, /) -> Tensor:
        """Add what the experts of each row make of it, in float32 and in the order of the experts.

        Args:
            x: [T, E], contiguous.
            routed: [T, E] that the router sees, contiguous.
            start: [T, E] to add to, contiguous; None for nothing.

        Returns:
            [T, E]; a row gets the same bits in every batch.
        """


@runtime_checkable
class FusesExperts(Protocol):
    """A backend that runs the experts of a layer by one call."""

    def fuse_experts(self, experts: RoutedExperts) -> FusedExperts | None:
        """Return the fused experts; None where the backend computes some of their products otherwise."""
