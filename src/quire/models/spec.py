"""Models as values: a `ModelSpec` says what a decoder computes; nothing here holds a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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
    """Division by the root mean square, then a learned scale."""

    eps: float


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention over all earlier tokens, query heads in groups that share a KV head.

    Args:
        qk_norm: norm of each query and key head before the rotation, or None.
        qkv_bias, output_bias: whether the projections add a learned bias.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    qk_norm: RMSNorm | None = None
    qkv_bias: bool = False
    output_bias: bool = False


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`down(silu(gate(x)) * up(x))`.

    Args:
        width: columns of gate and up.
        bias: whether all three projections add a learned bias.
    """

    width: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: `x += mixer(norm(x))`, then `x += ffn(norm(x))`."""

    norm: RMSNorm
    mixer: Attention
    ffn: GatedMLP


class CacheGroup(NamedTuple):
    """Layers that share one KV shape, and so one block table.

    Args:
        num_layers: layers of the group; a block holds all of them.
        num_kv_heads, head_dim: the shape of one token's keys in one layer.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int


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
    """

    vocab_size: int
    width: int
    layers: tuple[LayerSpec, ...]
    norm: RMSNorm
    tied_head: bool
    max_position: int

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups, in the order of their first layers."""
        shapes = [(layer.mixer.num_kv_heads, layer.mixer.head_dim) for layer in self.layers]
        return tuple(CacheGroup(shapes.count(shape), *shape) for shape in dict.fromkeys(shapes))

    @property
    def cache_places(self) -> tuple[tuple[int, int], ...]:
        """For each layer, its cache group and its place in it."""
        groups = [group[1:] for group in self.cache_groups]
        filled = [0] * len(groups)
        places = []
        for layer in self.layers:
            group_idx = groups.index((layer.mixer.num_kv_heads, layer.mixer.head_dim))
            places.append((group_idx, filled[group_idx]))
            filled[group_idx] += 1
        return tuple(places)


# Decoder weight name -> names of the checkpoint's tensors that make it up, concatenated on dimension 0.
WeightMap = dict[str, tuple[str, ...]]
