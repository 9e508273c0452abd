"""Formats of the weights of linear layers: unchanged, or quantised to few bits while they are loaded."""

from __future__ import annotations

from typing import Final, Literal

from quire.config import Quantization

WeightFormat = Literal["int8", "int6", "int4"]

# Number of inputs that share a scale in formats of fewer than eight bits.
GROUP: Final = 32
BITS: Final[dict[WeightFormat, int]] = {"int8": 8, "int6": 6, "int4": 4}
# The number of inputs must be a multiple of this.
UNITS: Final[dict[WeightFormat, int]] = {"int8": 4, "int6": GROUP, "int4": GROUP}
# Activations are int8 too: sums of more products than this may overflow 32 bits.
MAX_WIDTH: Final = (1 << 31) // (127 * 127)
# Rows and groups without a larger magnitude count as zeros: their scales would leave the range of float32.
SMALLEST: Final = 1e-30


def weight_format(quantization: Quantization | None, width: int, min_bits: int) -> WeightFormat | None:
    """Return the format of a weight with `width` inputs, or None for an unchanged weight.

    Args:
        quantization: requested quantisation.
        min_bits: minimum number of bits that the model states for this weight.
    """
    if quantization is None or width > MAX_WIDTH:
        return None
    wanted = max(min_bits, BITS[quantization])
    # The format with the fewest bits first.
    for name in ("int4", "int6", "int8"):
        if BITS[name] >= wanted and width % UNITS[name] == 0:
            return name
    return None
