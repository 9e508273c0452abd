"""Norms as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Division by the root mean square, then a learned scale.

    Args:
        eps: added to the mean square.
        zero_centred: the scale is 1 + weight. This sum, which bfloat16 would round, is stored and applied in float32.
        wide: the scale is applied in float32, before the result is rounded, even if the model's dtype can represent it.
        learned: whether there is a scale; only norms of heads may have none.
    """

    eps: float
    zero_centred: bool = False
    wide: bool = False
    learned: bool = True


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Subtraction of the mean and division by the standard deviation, then a learned scale.

    Args:
        eps: added to the variance.
        bias: whether a learned bias is added at the end.
    """

    eps: float
    bias: bool = True
