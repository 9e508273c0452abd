"""How the weights of linear layers may lie: as they came, or rounded to few bits when they are loaded."""

from __future__ import annotations

from typing import Final

from quire.config import Quantization

# Inputs that are rounded by one scale where weights are of four bits.
GROUP: Final = 32
# What a row's length must be a multiple of.
UNITS: Final[dict[Quantization, int]] = {"int8": 4, "int4": GROUP}
# Rows are int8 as well: sums of more products than this may leave 32 bits.
MAX_WIDTH: Final = (1 << 31) // (127 * 127)
# Rows and groups without a larger magnitude count as zeros: beside it scales would leave the range of floats.
SMALLEST: Final = 1e-30


def weight_format(quantization: Quantization | None, width: int, sensitive: bool) -> Quantization | None:
    """Return the format of a weight whose rows have `width` values, or None for as it came.

    Args:
        quantization: what was asked for.
        sensitive: four bits would harm it: it gets eight.
    """
    if quantization is None or width > MAX_WIDTH:
        return None
    if quantization == "int4" and not sensitive and width % UNITS["int4"] == 0:
        return "int4"
    return "int8" if width % UNITS["int8"] == 0 else None
