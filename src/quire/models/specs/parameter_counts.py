"""The numbers of parameters of a model, and their bytes in each form of weights."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Final, NamedTuple

from quire.config import Quantization

# Bytes of one quantised weight with its scales: in the layers, with groups of 32, and in the output head.
QUANTISED_BYTES: Final[Mapping[Quantization, tuple[Fraction, Fraction]]] = {
    "int8": (Fraction(17, 16), Fraction(17, 16)),
    "int4": (Fraction(9, 16), Fraction(13, 16)),
}
# Inputs per bfloat16 scale of quantised weights; in int8, the last projections of FFNs have smaller groups, because
# some of their inputs are many times as large as the others.
GROUP: Final = 32
DOWN_GROUP: Final = 16
SCALE_BYTES: Final = 2

# Bytes of a weight of experts that a checkpoint stores in MXFP4.
MXFP4_BYTES: Final = Fraction(9, 16)


class ParameterCounts(NamedTuple):
    """The parameters of the language model; vision and audio encoders are not counted.

    Args:
        tables: parameters of the embedding tables.
        head: parameters of the output head, which is the embedding table if tied.
        is_tied: whether the head is tied.
        projections: parameters of all other matrices.
        experts: parameters of the experts' projections, included in `projections`.
        downs: parameters of the last projections of FFNs without experts, included in `projections`.
    """

    tables: int
    head: int
    is_tied: bool
    projections: int
    experts: int = 0
    downs: int = 0

    @property
    def total(self) -> int:
        """Number of parameters; a tied head is counted once."""
        return self.tables + (0 if self.is_tied else self.head) + self.projections

    def num_bytes(self, element_bytes: int, quantization: Quantization | None, *, is_mxfp4: bool = False) -> int:
        """Return the bytes of the weights; a quantised head is stored separately from the embedding table."""
        if is_mxfp4:
            others = self._replace(projections=self.projections - self.experts, experts=0)
            return others.num_bytes(element_bytes, quantization) + int(self.experts * MXFP4_BYTES)
        if quantization is None:
            return self.total * element_bytes
        projection_bytes, head_bytes = self.bytes_of_weights(quantization)
        return self.tables * element_bytes + int(self.head * head_bytes) + int(self.projections * projection_bytes)

    def bytes_of_weights(self, quantization: Quantization) -> tuple[Fraction, Fraction]:
        """Return the bytes of a quantised weight with its scales: the mean of the projections, and in the head."""
        projection_bytes, head_bytes = QUANTISED_BYTES[quantization]
        if quantization == "int8" and self.projections:
            num_more = Fraction(SCALE_BYTES, DOWN_GROUP) - Fraction(SCALE_BYTES, GROUP)
            # A third of the parameters of an expert is in its last projection.
            projection_bytes += num_more * (self.downs + self.experts // 3) / self.projections
        return projection_bytes, head_bytes
