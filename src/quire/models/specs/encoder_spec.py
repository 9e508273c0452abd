"""Encoders as values: an `EncoderSpec` describes a bidirectional model without tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.models.specs.norm_spec import LayerNorm
from quire.models.specs.pooled_spec import ClassifierHead, Dense
from quire.models.specs.rotations import Rope

if TYPE_CHECKING:  # planning reads configurations without torch
    from quire.ops.interface.ops import Elementwise


@dataclass(frozen=True, slots=True)
class BidirectionalAttention:
    """Attention in which a token sees the tokens on both sides of it.

    Args:
        num_heads, head_dim: the heads, each with keys and values of its own.
        bias: whether the projections add a learned bias.
        rope: rotation of queries and keys; None for none.
        window: distance of the furthest token that a token sees on either side; None for all tokens.
    """

    num_heads: int
    head_dim: int
    bias: bool
    rope: Rope | None = None
    window: int | None = None


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
    """

    attention: BidirectionalAttention
    mlp: EncoderMLP
    mixer_norm: LayerNorm | None
    ffn_norm: LayerNorm
    norm_first: bool


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """A bidirectional encoder: embeddings, layers, and perhaps a head that classifies.

    Args:
        vocab_size: rows of the embedding of tokens.
        width: E, the size of a hidden state.
        layers: layers, from the embedding upwards.
        embedding_norm: norm of the sum of embeddings.
        norm: norm after the last layer; None for none.
        max_position: the longest text, in tokens.
        num_positions: rows of the learned embedding of positions; 0 for none.
        first_position: row of a text's first token there.
        num_token_types: rows of the embedding of token types (0 for a text, 1 for the second of a pair); 0 for none.
        classifier: head that classifies; None without one.
        dense: layers over pooled states, whose result is an embedding.
    """

    vocab_size: int
    width: int
    layers: tuple[EncoderLayer, ...]
    embedding_norm: LayerNorm
    norm: LayerNorm | None
    max_position: int
    num_positions: int = 0
    first_position: int = 0
    num_token_types: int = 0
    classifier: ClassifierHead | None = None
    dense: tuple[Dense, ...] = ()
