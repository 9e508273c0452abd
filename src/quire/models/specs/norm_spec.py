"""Norms as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Division by the root mean square, then a learned scale.

    Args:
        eps: added to the mean square.
        zero_centred: the weight is what the scale has more than 1. Their sum, which bfloat16 does not hold, is kept
            and applied in float32.
        wide: the scale is applied in float32, before the one rounding, even where the model's dtype holds it.
        learned: whether there is a scale; else it is 1. Of heads only.
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
        bias: whether a learned bias is added at last.
    """

    eps: float
    bias: bool = True
