"""Formats of the weights of linear layers: unchanged, or quantised to few bits while they are loaded."""

from __future__ import annotations

from typing import Final, Literal

from quire.config import Quantization
from quire.ops.interface.quantized_weight import WeightForm

WeightFormat = Literal["int8", "int6", "int4"]

# Number of inputs that share a scale.
GROUP: Final = 32
# The format with the fewest bits first.
FORMS: Final[dict[WeightFormat, WeightForm]] = {
    "int4": WeightForm(4, GROUP, "bfloat16", offset=8),
    "int6": WeightForm(6, GROUP, "bfloat16", offset=32),
    "int8": WeightForm(8, GROUP, "bfloat16", offset=128),
}
# Groups without a larger magnitude count as zeros: their scales would leave the range of float32.
SMALLEST: Final = 1e-30


def weight_format(quantization: Quantization | None, min_bits: int) -> WeightFormat | None:
    """Return the format of a weight, or None for an unchanged weight.

    Args:
        quantization: requested quantisation.
        min_bits: minimum number of bits that the model states for this weight.
    """
    if quantization is None:
        return None
    wanted = max(min_bits, FORMS[quantization].bits)
    return next(name for name, form in FORMS.items() if form.bits >= wanted)
