"""Formats of the weights of linear layers: as they came, or rounded to few bits when they are loaded."""

from __future__ import annotations

from typing import Final, Literal

from quire.config import Quantization

WeightFormat = Literal["int8", "int6", "int4"]

# Inputs that are rounded by one scale where weights are of fewer than eight bits.
GROUP: Final = 32
BITS: Final[dict[WeightFormat, int]] = {"int8": 8, "int6": 6, "int4": 4}
# Units of a row's length.
UNITS: Final[dict[WeightFormat, int]] = {"int8": 4, "int6": GROUP, "int4": GROUP}
# Rows are int8 as well: sums of more products than this may leave 32 bits.
MAX_WIDTH: Final = (1 << 31) // (127 * 127)
# Rows and groups without a larger magnitude count as zeros: beside it scales would leave the range of floats.
SMALLEST: Final = 1e-30


def weight_format(quantization: Quantization | None, width: int, min_bits: int) -> WeightFormat | None:
    """Return the format of a weight whose rows have `width` values, or None for as it came.

    Args:
        quantization: the requested rounding.
        min_bits: fewer would harm it.
    """
    if quantization is None or width > MAX_WIDTH:
        return None
    wanted = max(min_bits, BITS[quantization])
    # The fewest bits first.
    for name in ("int4", "int6", "int8"):
        if BITS[name] >= wanted and width % UNITS[name] == 0:
            return name
    return None
