"""Models as values: a `ModelSpec` says what a decoder computes; nothing here holds a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # planning reads configurations without torch
    from quire.ops.interface import Activation


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a smooth change between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Frequencies interpolated by how often they turn within the original context, and attention sharpened.

    Args:
        attention_factor: what cosine and sine are multiplied by.
        truncate: round the ramp's ends to whole frequencies.

    Source: YaRN, arXiv 2309.00071.
    """

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding over the whole head, the two halves of a head rotated against each other.

    Source: RoFormer, arXiv 2104.09864.
    """

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Division by the root mean square, then a learned scale.

    Args:
        eps: added to the mean square.
        zero_centred: the weight is what the scale has more than 1. Their sum, which bfloat16 does not hold, is kept
            and applied in float32.
    """

    eps: float
    zero_centred: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention, query heads in groups that share a KV head.

    Args:
        qk_norm: norm of each query and key head before the rotation, or None.
        qkv_bias, output_bias: whether the projections add a learned bias.
        window: tokens that a token sees, itself included; None for all before it.
        score_scale: what scores are multiplied by before the softmax; None for `head_dim ** -0.5`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    qk_norm: RMSNorm | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    window: int | None = None
    score_scale: float | None = None


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`down(activation(gate(x)) * up(x))`.

    Args:
        width: columns of gate and up.
        bias: whether all three projections add a learned bias.
        activation: of the gate.
    """

    width: int
    bias: bool = False
    activation: Activation = "silu"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: `x += post_norm(mixer(norm(x)))`, then `x += post_norm(ffn(norm(x)))`.

    Args:
        norm: before the mixer, and before the FFN.
        mixer, ffn: the two halves.
        post_norm: of what the mixer gives, and of what the FFN gives; None adds it as it is.
    """

    norm: RMSNorm
    mixer: Attention
    ffn: GatedMLP
    post_norm: RMSNorm | None = None


class CacheGroup(NamedTuple):
    """Layers that share one KV shape and one window, and so one block table.

    Args:
        num_layers: layers of the group; a block holds all of them.
        num_kv_heads, head_dim: the shape of one token's keys in one layer.
        window: tokens that a token sees in these layers, itself included; None for all before it.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only language model.

    Args:
        vocab_size: rows of the embedding and of the head.
        width: E, the size of a hidden state.
        layers: from the embedding upwards.
        norm: before the head.
        tied_head: the head is the embedding.
        max_position: the longest context that the model was made for, in tokens.
        embedding_scale: what embeddings are multiplied by, rounded to their dtype first; the head is not.
        logit_cap: logits become `logit_cap * tanh(logits / logit_cap)`; None leaves them.
    """

    vocab_size: int
    width: int
    layers: tuple[LayerSpec, ...]
    norm: RMSNorm
    tied_head: bool
    max_position: int
    embedding_scale: float = 1.0
    logit_cap: float | None = None

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups, in the order of their first layers."""
        kinds = [_cache_kind(layer.mixer) for layer in self.layers]
        return tuple(CacheGroup(kinds.count(kind), *kind) for kind in dict.fromkeys(kinds))

    @property
    def cache_places(self) -> tuple[tuple[int, int], ...]:
        """For each layer, its cache group and its place in it."""
        groups = [group[1:] for group in self.cache_groups]
        filled = [0] * len(groups)
        places = []
        for layer in self.layers:
            group_idx = groups.index(_cache_kind(layer.mixer))
            places.append((group_idx, filled[group_idx]))
            filled[group_idx] += 1
        return tuple(places)


def _cache_kind(mixer: Attention) -> tuple[int, int, int | None]:
    """Return what layers of one cache group have in common."""
    return mixer.num_kv_heads, mixer.head_dim, mixer.window


# Decoder weight name -> names of the checkpoint's tensors that make it up, concatenated on dimension 0.
WeightMap = dict[str, tuple[str, ...]]
