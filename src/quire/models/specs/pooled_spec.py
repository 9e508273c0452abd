"""Layers over a pooled hidden state as values: the head that classifies, and dense layers of embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from quire.models.specs.norm_spec import LayerNorm

if TYPE_CHECKING:  # planning reads configurations without torch
    from quire.ops.interface.ops import Elementwise


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer, and an activation of its outputs.

    Args:
        width: number of outputs.
        bias: whether it adds a learned bias.
        activation: the activation; None for none.
    """

    width: int
    bias: bool
    activation: Elementwise | None = None


@dataclass(frozen=True, slots=True)
class ClassifierHead:
    """Logits of classes: `output(norm(dense(pooled)))`.

    Args:
        labels: names of the classes, in the order of the logits.
        pooling: rows that `pooled` is made of: the first one, the last one, or the mean of all; "tokens" for logits of
            each row.
        scores: function from logits to scores, unless a request asks for the logits: each logit's sigmoid, the softmax
            over all, or none.
        dense: layer before the output layer; None for none.
        norm: norm after it; None for none.
        bias: whether the output layer adds a learned bias.
        step_token: token at which a process reward model gives the reward of a step, with logits of each row; None for
            all tokens.
    """

    labels: tuple[str, ...]
    pooling: Literal["cls", "last", "mean", "tokens"]
    scores: Literal["sigmoid", "softmax", "none"]
    dense: Dense | None = None
    norm: LayerNorm | None = None
    bias: bool = True
    step_token: int | None = None
