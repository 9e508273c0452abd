"""Encoders as values: an `EncoderSpec` describes a bidirectional model without tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.models.specs.norm_spec import LayerNorm, RMSNorm
from quire.models.specs.pooled_spec import ClassifierHead, Dense
from quire.models.specs.rotations import Rope

if TYPE_CHECKING:  # planning reads configurations without torch
    from quire.ops.interface.ops import Elementwise


@dataclass(frozen=True, slots=True)
class BidirectionalAttention:
    """Attention in which a token sees the tokens on both sides of it.

    Args:
        num_heads, num_kv_heads, head_dim: query heads in groups that share a head of keys and values.
        qkv_bias, output_bias: whether the projections add a learned bias.
        rope: rotation of queries and keys; None for none.
        window: distance of the furthest token that a token sees on either side; None for all tokens.
        qk_norm: norm of each query and key head before the rotation; None for none.
        score_scale: factor of scores before the softmax; None for `head_dim ** -0.5`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    rope: Rope | None = None
    window: int | None = None
    qk_norm: RMSNorm | None = None
    score_scale: float | None = None


@dataclass(frozen=True, slots=True)
class RelativePositions:
    """Learned addends of scores, for each head and bucket of distances between tokens; all layers share them.

    Half of the buckets are for keys after the query. Of each half, a half has one distance each, and the others get
    wider up to `max_distance`, beyond which all distances are in the last.

    Args:
        num_buckets: number of buckets.
        max_distance: distance from which on all are in one bucket.

    Source: T5, arXiv 1910.10683.
    """

    num_buckets: int
    max_distance: int


@dataclass(frozen=True, slots=True)
class EncoderMLP:
    """`down(activation(up(x)))`; gated, `down(activation(a) * b)`, where `a, b` are the halves of `up(x)`.

    Args:
        width: input columns of `down`.
        activation: activation of all columns, or of the gates.
        gated: whether there are gates.
        bias: whether both projections add a learned bias.
    """

    width: int
    activation: Elementwise
    gated: bool = False
    bias: bool = True


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One layer: with `x = norm(x + attention(x))`, or `x = x + attention(norm(x))`, then the same with the MLP.

    Args:
        attention, mlp: the two halves.
        mixer_norm: norm of the attention; None for none.
        ffn_norm: norm of the MLP.
        norm_first: whether norms come before the halves (pre-norm), or after the residual is added (post-norm).
        output_norm: further norm of the output of each half, before it is added to the residual; None for none.
    """

    attention: BidirectionalAttention
    mlp: EncoderMLP
    mixer_norm: LayerNorm | RMSNorm | None
    ffn_norm: LayerNorm | RMSNorm
    norm_first: bool
    output_norm: RMSNorm | None = None


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """A bidirectional encoder: embeddings, layers, and perhaps a head that classifies.

    Args:
        vocab_size: rows of the embedding of tokens.
        width: E, the size of a hidden state.
        layers: layers, from the embedding upwards.
        embedding_norm: norm of the sum of embeddings; None for none.
        norm: norm after the last layer; None for none.
        max_position: the longest text, in tokens.
        num_positions: rows of the learned embedding of positions; 0 for none.
        first_position: row of a text's first token there.
        embedding_scale: factor of embeddings of tokens, rounded to their dtype first.
        relative_positions: addends of scores; None for none.
        num_token_types: rows of the embedding of token types (0 for a text, 1 for the second of a pair); 0 for none.
        classifier: head that classifies; None without one.
        dense: layers over pooled states, whose result is an embedding.
    """

    vocab_size: int
    width: int
    layers: tuple[EncoderLayer, ...]
    embedding_norm: LayerNorm | None
    norm: LayerNorm | RMSNorm | None
    max_position: int
    num_positions: int = 0
    first_position: int = 0
    num_token_types: int = 0
    embedding_scale: float = 1.0
    relative_positions: RelativePositions | None = None
    classifier: ClassifierHead | None = None
    dense: tuple[Dense, ...] = ()
