"""The number of parameters of a model and their bytes, from its `ModelSpec`: matrices only.

Norms, biases and convolution taps are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Final, NamedTuple

from quire.config import Quantization
from quire.models.spec import (
    FFN,
    Attention,
    Experts,
    GatedDeltaNet,
    GatedMLP,
    LayerSpec,
    Mamba2,
    Mixer,
    MLPBesideExperts,
    ModelSpec,
    ShortConv,
    experts_of,
)

# Bytes of one quantised weight, scales included: of a matrix in the layers, and of the output head.
QUANTISED_BYTES: Final[Mapping[Quantization, tuple[Fraction, Fraction]]] = {
    "int8": (Fraction(1), Fraction(1)),
    "int4": (Fraction(9, 16), Fraction(13, 16)),
}


# Bytes of a weight of experts that a checkpoint stores in MXFP4.
MXFP4_BYTES: Final = Fraction(9, 16)


class ParameterCounts(NamedTuple):
    """The parameters of the language model; vision and audio encoders are not counted.

    Args:
        tables: parameters of the embedding tables.
        head: parameters of the output head, which is the embedding table where it is tied.
        is_tied: whether the head is tied.
        projections: parameters of all other matrices.
        experts: parameters of the projections of experts, which are among these.
    """

    tables: int
    head: int
    is_tied: bool
    projections: int
    experts: int = 0

    @property
    def total(self) -> int:
        """Number of parameters; a tied head is counted once."""
        return self.tables + (0 if self.is_tied else self.head) + self.projections

    def num_bytes(self, element_bytes: int, quantization: Quantization | None, *, is_mxfp4: bool = False) -> int:
        """Return the bytes of the weights; a quantised head is stored separately from the embedding table.

        Args:
            is_mxfp4: the experts are stored in MXFP4, and are kept so.
        """
        if is_mxfp4:
            others = self._replace(projections=self.projections - self.experts, experts=0)
            return others.num_bytes(element_bytes, quantization) + int(self.experts * MXFP4_BYTES)
        if quantization is None:
            return self.total * element_bytes
        projection_bytes, head_bytes = QUANTISED_BYTES[quantization]
        return self.tables * element_bytes + int(self.head * head_bytes) + int(self.projections * projection_bytes)


def estimate_parameters(spec: ModelSpec) -> ParameterCounts:
    """Estimate the parameters of a model."""
    embedding = 0 if spec.is_mtp else spec.vocab_size * spec.width
    tables, projections = embedding, sum(layer_parameters(layer, spec.width) for layer in spec.layers)
    if spec.is_mtp:
        projections += 2 * spec.width**2
    if spec.per_layer_inputs is not None:
        # One table; one projection of the embedding; a gate and a projection in each layer.
        columns = len(spec.layers) * spec.per_layer_inputs.width
        tables += spec.per_layer_inputs.vocab_size * columns
        projections += 3 * columns * spec.width
    all_experts = (experts_of(layer.ffn) for layer in spec.layers)
    experts = sum(3 * spec.width * each.width * each.num_local for each in all_experts if each is not None)
    return ParameterCounts(tables, embedding, spec.tied_head, projections, experts)


def layer_parameters(layer: LayerSpec, width: int) -> int:
    """Return the parameters of a layer of a model of some width."""
    return sum(_mixer(part, width) for part in layer.parts) + _ffn(layer.ffn, width)


def _mixer(mixer: Mixer, width: int) -> int:
    match mixer:
        case Attention():
            # Queries and output; the output gate is as large as the queries.
            num_heads = mixer.num_heads * (3 if mixer.output_gate else 2)
            num_kv_heads = 0 if mixer.source is not None else 2 * mixer.num_kv_heads
            return width * mixer.head_dim * (num_heads + num_kv_heads)
        case ShortConv():
            return 4 * width * mixer.num_channels
        case Mamba2():
            # Gate, convolution input and step sizes; then the output.
            return width * (mixer.inner + mixer.num_channels + mixer.num_heads) + mixer.inner * width
        case GatedDeltaNet():
            # Convolution input, output gate and two gates for each head; then the output.
            return width * (mixer.num_channels + mixer.inner + 2 * mixer.num_value_heads) + mixer.inner * width


def _ffn(ffn: FFN, width: int) -> int:
    match ffn:
        case GatedMLP():
            return 3 * width * ffn.width
        case Experts():
            num_shared = 3 * width * ffn.shared_width + (width if ffn.shared_gate else 0)
            return ffn.num_local * 3 * width * ffn.width + ffn.num_experts * width + num_shared
        case MLPBesideExperts():
            return _ffn(ffn.mlp, width) + _ffn(ffn.experts, width)
