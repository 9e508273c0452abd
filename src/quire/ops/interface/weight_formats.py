"""Formats of the weights of linear layers: unchanged, or quantised to few bits while they are loaded."""

from __future__ import annotations

from typing import Final, Literal

from quire.config import Quantization
from quire.ops.interface.quantized_weight import WeightForm

WeightFormat = Literal["int8 of 16", "int8", "int6", "int4"]

# Formats with fewer bits first; among formats with equal bits, larger groups of inputs first.
FORMS: Final[dict[WeightFormat, WeightForm]] = {
    "int4": WeightForm(4, 32, "bfloat16", offset=8),
    "int6": WeightForm(6, 32, "bfloat16", offset=32),
    "int8": WeightForm(8, 32, "bfloat16", offset=128),
    "int8 of 16": WeightForm(8, 16, "bfloat16", offset=128),
}
# Groups without a larger magnitude count as zeros: their scales would leave the range of float32.
SMALLEST: Final = 1e-30


def weight_format(quantization: Quantization | None, min_bits: int, max_group: int = 32) -> WeightFormat | None:
    """Return the format of a weight, or None for an unchanged weight."""
    if quantization is None:
        return None
    wanted = max(min_bits, FORMS[quantization].bits)
    bits = min(form.bits for form in FORMS.values() if form.bits >= wanted)
    names = [name for name, form in FORMS.items() if form.bits == bits]
    return next((name for name in names if FORMS[name].group <= max_group), names[-1])
