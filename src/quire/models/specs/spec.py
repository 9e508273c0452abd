"""Models as values: a `ModelSpec` describes a decoder without tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from quire.models.specs.norm_spec import LayerNorm
from quire.models.specs.norm_spec import RMSNorm as RMSNorm
from quire.models.specs.pooled_spec import ClassifierHead, Dense
from quire.models.specs.recurrent_spec import GatedDeltaNet as GatedDeltaNet
from quire.models.specs.recurrent_spec import Mamba2 as Mamba2
from quire.models.specs.recurrent_spec import ShortConv as ShortConv
from quire.models.specs.recurrent_spec import StateCacheShape as StateCacheShape
from quire.models.specs.rotations import LongRopeScaling, Rope, Sections, Temperature

if TYPE_CHECKING:  # planning reads configurations without torch
    from quire.ops.interface.ops import Activation, Elementwise


class TokenCacheShape(NamedTuple):
    """The cache of a token in an attention layer; layers with equal shapes are one cache group.

    Args:
        num_kv_heads, head_dim: the shape of one token's keys.
        window: tokens that a token sees, including itself; None for all before it.
        chunk: length of the chunks, in tokens; a token sees its own chunk only. None for no chunks.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention, query heads in groups that share a KV head.

    Args:
        rope: rotation of queries and keys; None for none.
        qk_norm: norm of each query and key head before the rotation, or None.
        value_norm: values are divided by their root mean square, with the epsilon of `qk_norm`.
        qkv_bias, output_bias: whether the projections add a learned bias.
        window: tokens that a token sees, including itself; None for all before it.
        chunk: length of the chunks, in tokens; a token sees its own chunk, up to itself. None for no chunks.
        score_scale: factor of scores before the softmax; None for `head_dim ** -0.5`.
        source: the earlier layer whose keys and values are read; None for the layer's own.
        output_gate: True if the output is multiplied by the sigmoid of gates, which are projected with the queries.
        temperature: factor of queries after norm and rotation; None for none.
        sinks: whether each query head has a learned sink: one more score in its softmax, without a value.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)` before the softmax; None leaves them.
        joint_qk_norm: `qk_norm` divides all query heads of a token by one number, and all key heads by another.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    qk_norm: RMSNorm | None = None
    value_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    window: int | None = None
    chunk: int | None = None
    score_scale: float | None = None
    source: int | None = None
    output_gate: bool = False
    temperature: Temperature | None = None
    sinks: bool = False
    soft_cap: float | None = None
    joint_qk_norm: bool = False

    def for_context(self, length: int) -> Attention:
        """Return the layer for contexts of at most `length` tokens; see `LongRopeScaling`."""
        if self.rope is None or not isinstance(self.rope.scaling, LongRopeScaling):
            return self
        scaling = replace(self.rope.scaling, is_long=length > self.rope.scaling.original_max_position)
        return replace(self, rope=replace(self.rope, scaling=scaling))

    @property
    def cache(self) -> TokenCacheShape | None:
        """The layer's cache: keys and values of the tokens that it still sees; None if it reads another layer's."""
        cache = TokenCacheShape(self.num_kv_heads, self.head_dim, self.window, self.chunk)
        return cache if self.source is None else None


Mixer = Attention | ShortConv | Mamba2 | GatedDeltaNet


@dataclass(frozen=True, slots=True)
class Parallel:
    """Mixers side by side: they have the same input, and their scaled outputs are added.

    Args:
        parts: the mixers.
        scales: one for each part.
    """

    parts: tuple[Mixer, ...]
    scales: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`down(activation(gate_scale * gate(x)) * up(x))`.

    Args:
        width: columns of gate and up.
        bias: whether all three projections add a learned bias.
        activation: activation of the gate.
        gate_scale: factor of the gate before its activation.
        cutoff: mean plus so many standard deviations of a row's gates, over all columns, is subtracted from them, and
            what is negative is set to zero, before the activation; None for no cutoff.

    Source: of the cutoff, Spark Transformer, arXiv 2506.06644.
    """

    width: int
    bias: bool = False
    activation: Activation = "silu"
    gate_scale: float = 1.0
    cutoff: float | None = None


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """`down(activation(up(x)))`.

    Args:
        width: columns of up.
        activation: activation of all columns.
        bias: whether both projections add a learned bias.
    """

    width: int
    activation: Elementwise
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """Gated MLPs: each token is sent to the few experts with the highest logits of a linear router.

    Args:
        num_experts: X.
        num_chosen: C, experts of a token.
        width: columns of an expert's gate and up.
        scoring: function from logits to scores: softmax over all experts, or sigmoid.
        renormalised: the chosen scores are divided by their sum.
        scaled_input: scores multiply the experts' inputs instead of their outputs.
        shared_width: columns of the shared expert, which processes every token; 0 for none.
        activation: activation of the gates.
        transposed: experts are stored as [X, in, out], instead of as the rows of linear layers.
        shared_gate: the shared expert's output is multiplied by the sigmoid of its own gate.
        choice_bias: a learned bias of each expert is added to the scores for the choice of experts only.
        sum_eps: added to the sum that scores are divided by.
        score_scale: factor of the final scores.
        expert_scales: whether each expert has a learned factor of its score.
        router_norm: norm of the router's input alone; None for none.
        logit_scale: factor of the router's logits.
        bias: whether the router and the projections of experts add a learned bias.
        interleaved: rows of gate and up alternate in an expert's stored first projection.
        parameters: layout of an expert in transformers' parameter of all experts, which may differ from the
            checkpoint: "rows" [out, in], "columns" [in, out], or "alternating" [in, out] with gate and up in turn.
        local: first expert that this rank computes, and the one after the last; None for all.
        plain: activation of experts that are plain MLPs, the shared one too: their gates and ups are ups alone. None
            for gated ones.

    Source: sparsely gated experts, arXiv 1701.06538.
    """

    num_experts: int
    num_chosen: int
    width: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalised: bool = False
    scaled_input: bool = False
    shared_width: int = 0
    activation: Activation = "silu"
    transposed: bool = False
    shared_gate: bool = False
    choice_bias: bool = False
    sum_eps: float = 0.0
    score_scale: float = 1.0
    expert_scales: bool = False
    router_norm: RMSNorm | None = None
    logit_scale: float = 1.0
    bias: bool = False
    interleaved: bool = False
    parameters: Literal["rows", "columns", "alternating"] = "rows"
    local: tuple[int, int] | None = None
    plain: Elementwise | None = None

    @property
    def gate_up_width(self) -> int:
        """Rows of an expert's first projection."""
        return self.width if self.plain is not None else 2 * self.width

    @property
    def shared(self) -> GatedMLP | PlainMLP | None:
        """The shared expert, or None."""
        if not self.shared_width:
            return None
        if self.plain is not None:
            return PlainMLP(self.shared_width, self.plain)
        return GatedMLP(self.shared_width, activation=self.activation)

    @property
    def bounds(self) -> tuple[int, int]:
        """First expert that this rank computes, and the one after the last."""
        return (0, self.num_experts) if self.local is None else self.local

    @property
    def num_local(self) -> int:
        """Number of experts that this rank computes."""
        first, end = self.bounds
        return end - first


@dataclass(frozen=True, slots=True)
class MLPBesideExperts:
    """A gated MLP and experts side by side: `norm(mlp(x)) + norm(experts(norm(residual)))`; the norms differ.

    Args:
        mlp: MLP, whose input is the output of the layer's norm.
        experts: experts, whose input is the residual after their own norm; their router's input is the residual.
        norm: norm of the experts' input, and of both outputs.

    Source: Gemma 4 with experts.
    """

    mlp: GatedMLP
    experts: Experts
    norm: RMSNorm


FFN = GatedMLP | PlainMLP | Experts | MLPBesideExperts


def experts_of(ffn: FFN | None) -> Experts | None:
    """Return the experts of an FFN, or None."""
    return ffn.experts if isinstance(ffn, MLPBesideExperts) else ffn if isinstance(ffn, Experts) else None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: `x += mixer_scale * post_norm(mixer(norm(x)))`, then the same with the FFN.

    Args:
        norm: norm before the mixer, and before the FFN; None for none.
        mixer, ffn: the two halves; None for a layer of the other half alone.
        post_norm: norm of the mixer's output, and of the FFN's; None for none, as with mixers in parallel.
        mixer_scale, ffn_scale: factors of these outputs before they are added.
        learned_scale: whether `x` is multiplied by a learned number at the end.
    """

    norm: RMSNorm | LayerNorm | None
    mixer: Mixer | Parallel | None
    ffn: FFN | None
    post_norm: RMSNorm | None = None
    mixer_scale: float = 1.0
    ffn_scale: float = 1.0
    learned_scale: bool = False

    @property
    def parts(self) -> tuple[Mixer, ...]:
        """The mixers; each has its own cache or reads another layer's."""
        if isinstance(self.mixer, Parallel):
            return self.mixer.parts
        return () if self.mixer is None else (self.mixer,)


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """Per-layer inputs: P values of each token for every layer, besides the hidden state.

    They are `sqrt(1 / 2) * (norm(projection(e) / sqrt(E)) + sqrt(P) * table[token])`, `e` being the token's embedding.
    After its FFN, a layer adds its inputs `told`: `x += norm(projection(activation(gate(x)) * told))`.

    Args:
        vocab_size: rows of the table.
        width: P.
        norm: norm of both projections.
        activation: activation of the gate.

    Source: per-layer embeddings of Gemma 3n.
    """

    vocab_size: int
    width: int
    norm: RMSNorm
    activation: Activation


@dataclass(frozen=True, slots=True)
class AltUp:
    """Alternating updates: a token has several hidden states, and a layer computes the first of them.

    Before the layer all are predicted by a linear map of all; after it, each is corrected by what the first changed
    against its prediction. The coefficients of both depend on the first. A layer's own inputs are added to the others.
    The mixer has a low-rank branch beside it (LAuReL): `sqrt(1 / 2) * (x + mixer(n) + n + norm(right(left(n))))`, `n`
    being the layer's normed input.

    Args:
        num_streams: N, hidden states of a token.
        low_rank: rank of the branch beside the mixer.
        norm: norm of the branch, and of the input of coefficients.
        has_output_scale: whether the first state is scaled, by a learned factor of each value, for the layer's own
            inputs.

    Source: AltUp, arXiv 2301.13310; LAuReL, arXiv 2411.07501; both in Gemma 3n.
    """

    num_streams: int
    low_rank: int
    norm: RMSNorm
    has_output_scale: bool = True


class LayerGroup(NamedTuple):
    """Layers with equal caches, which share a block table; a layer with mixers side by side is in several groups.

    Args:
        num_layers: layers of the group; a block holds all of them.
        cache: shape of each layer's cache, for a token or for a sequence.
    """

    num_layers: int
    cache: TokenCacheShape | StateCacheShape


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The treatment of the rows of images in a decoder.

    Args:
        sections: axes of the frequencies of its rotations; None if images' tokens have positions in a line.
        num_deepstack: first layers to whose outputs the encoder's additions for a row are added.
        see_each_other: True if the rows of an image see each other in all layers, also forward.
    """

    sections: Sections | None = None
    num_deepstack: int = 0
    see_each_other: bool = False

    def of_grid(self, grid: tuple[int, int] | None) -> tuple[tuple[int, int] | None, bool]:
        """Return `grid` and `sees_itself` of a medium with rows and columns, or without; see `Media`."""
        return None if self.sections is None else grid, self.see_each_other and grid is not None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only language model.

    Args:
        vocab_size: rows of the embedding and of the head.
        width: E, the size of a hidden state.
        layers: layers, from the embedding upwards.
        norm: norm before the head.
        tied_head: the head is the embedding.
        max_position: the longest context that the model was trained for, in tokens.
        num_positions: rows of a learned table of positions, which are added to embeddings; 0 without one.
        embedding_scale: factor of embeddings, rounded to their dtype first; the head is not scaled.
        logit_scale: factor of logits.
        logit_cap: logits then become `logit_cap * tanh(logits / logit_cap)`; None leaves them.
        per_layer_inputs: inputs of every layer besides the hidden state, or None.
        alt_up: several hidden states of a token, in a model with per-layer inputs; None for one.
        mtp: layer of the checkpoint's head for multi-token prediction (MTP); None without one.
        is_mtp: True if the model is such a head: its inputs are pairs of a hidden state and a token, it caches the last
            hidden state of a sequence, and it has the embedding and output head of its target model.
        classifier: head that classifies; None without one.
        dense: layers over pooled states, whose result is an embedding.
        image_rows: treatment of the rows of images.
    """

    vocab_size: int
    width: int
    layers: tuple[LayerSpec, ...]
    norm: RMSNorm | LayerNorm
    tied_head: bool
    max_position: int
    num_positions: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    per_layer_inputs: PerLayerInputs | None = None
    alt_up: AltUp | None = None
    mtp: LayerSpec | None = None
    is_mtp: bool = False
    classifier: ClassifierHead | None = None
    dense: tuple[Dense, ...] = ()
    image_rows: ImageRows = ImageRows()

    def for_context(self, length: int) -> ModelSpec:
        """Return the model for contexts of at most `length` tokens."""
        layers = (
            replace(layer, mixer=layer.mixer.for_context(length)) if isinstance(layer.mixer, Attention) else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    @property
    def has_long_factors(self) -> bool:
        """True if keys are rotated by the long factors of a LongRoPE scaling."""
        ropes = (part.rope for layer in self.layers for part in layer.parts if isinstance(part, Attention))
        return any(rope and isinstance(rope.scaling, LongRopeScaling) and rope.scaling.is_long for rope in ropes)

    @property
    def last_cached_layer(self) -> int:
        """The last layer with a cache, -1 for none; after its mixer, only output rows are computed."""
        keeping = (any(part.cache is not None for part in layer.parts) for layer in self.layers)
        return max((idx for idx, is_keeping in enumerate(keeping) if is_keeping), default=-1)

    @property
    def cache_groups(self) -> tuple[LayerGroup, ...]:
        """The cache groups in the order of their first layers, token caches before states."""
        cache = [mixer.cache for layer in self.layers for mixer in layer.parts if mixer.cache is not None]
        kinds = sorted(dict.fromkeys(cache), key=lambda kind: isinstance(kind, StateCacheShape))
        groups = tuple(LayerGroup(cache.count(kind), kind) for kind in kinds)
        return (*groups, LayerGroup(1, StateCacheShape(1, self.width))) if self.is_mtp else groups

    @property
    def cache_positions(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each layer and each of its parts, the cache group and the position in it.

        A part that reads another layer's cache has the group and position of that layer's part with an equal cache.
        """
        kinds: list[TokenCacheShape | StateCacheShape | None] = [group.cache for group in self.cache_groups]
        filled = [0] * len(kinds)
        positions: list[tuple[tuple[int, int], ...]] = []
        for layer in self.layers:
            parts = []
            for mixer in layer.parts:
                if isinstance(mixer, Attention) and mixer.source is not None:
                    wanted = replace(mixer, source=None).cache
                    position = next(
                        (position for position in positions[mixer.source] if kinds[position[0]] == wanted), None
                    )
                    assert position is not None, "a cache of another shape"
                    parts.append(position)
                    continue
                group_idx = kinds.index(mixer.cache)
                parts.append((group_idx, filled[group_idx]))
                filled[group_idx] += 1
            positions.append(tuple(parts))
        return tuple(positions)


# Decoder weight name -> names of the checkpoint's tensors that make it up, concatenated on dimension 0.
WeightMap = dict[str, tuple[str, ...]]
