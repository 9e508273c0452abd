"""The number of parameters of a model and their bytes, from its `ModelSpec`: matrices only.

Norms, biases and convolution taps are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from quire.config import Quantization
from quire.models.specs.hosted_spec import HostedSpec
from quire.models.specs.parameter_counts import (
    DOWN_GROUP,
    GROUP,
    MXFP4_BYTES,
    QUANTISED_BYTES,
    SCALE_BYTES,
    ParameterCounts,
)
from quire.models.specs.spec import (
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
    PlainMLP,
    ShortConv,
)
from quire.models.specs.vision_spec import JoinedSquares, VisionSpec


class Matrix(NamedTuple):
    """The weights of equal linear layers.

    Args:
        num_rows: number of outputs of all these layers together.
        width: number of inputs of each.
        min_bits: fewest bits to which a weight is rounded.
        is_expert: whether they are projections of experts.
        is_down: whether they are the last projections of FFNs.
    """

    num_rows: int
    width: int
    min_bits: int = 4
    is_expert: bool = False
    is_down: bool = False

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self.num_rows * self.width

    def triton_bytes(self, element_bytes: int, quantization: Quantization | None) -> int:
        """Return the bytes of the weights with Triton's kernels, scales included."""
        if quantization is None:
            return self.size * element_bytes
        is_paired = max(self.min_bits, 4 if quantization == "int4" else 8) == 4
        group = DOWN_GROUP if self.is_down and quantization == "int8" else GROUP
        num_groups = -(-self.width // group)
        if is_paired:
            num_groups += num_groups % 2  # pairs of groups share bytes
        # A code of six bits takes a byte.
        return self.num_rows * num_groups * (group * (4 if is_paired else 8) // 8 + SCALE_BYTES)


def estimate_parameters(spec: ModelSpec | HostedSpec) -> ParameterCounts:
    """Estimate the parameters of a model."""
    if isinstance(spec, HostedSpec):
        return spec.parameters
    embedding = _embedding_size(spec)
    matrices = list(_projections(spec))
    return ParameterCounts(
        tables=embedding + _other_tables_size(spec),
        head=embedding,
        is_tied=spec.tied_head,
        projections=sum(matrix.size for matrix in matrices),
        experts=sum(matrix.size for matrix in matrices if matrix.is_expert),
        downs=sum(matrix.size for matrix in matrices if matrix.is_down and not matrix.is_expert),
    )


def estimate_vision(spec: VisionSpec) -> ParameterCounts:
    """Estimate the parameters of an encoder of images; the table is that of its positions."""
    joined, mergers = spec.width * spec.merge_size**2, 1 + len(spec.deepstack)
    projections = math.prod(spec.patch_shape) * spec.width
    for layer in spec.layers:
        heads = layer.attention
        projections += 2 * spec.width * (heads.num_heads + heads.num_kv_heads) * heads.head_dim
        projections += (3 if layer.mlp.gated else 2) * spec.width * layer.mlp.width
    if isinstance(spec.merger, JoinedSquares):
        projections += mergers * joined * (joined + spec.out_width)
    else:
        projections += spec.width * spec.out_width
    return ParameterCounts(spec.table_side**2 * spec.width, 0, is_tied=True, projections=projections)


def smaller_forms(quantization: Quantization | None) -> tuple[Quantization, ...]:
    """Return the forms of quantised weights that take fewer bytes than `quantization`, largest first."""
    forms = tuple(QUANTISED_BYTES)
    return forms if quantization is None else forms[1 + forms.index(quantization) :]


def weight_bytes(
    spec: ModelSpec | HostedSpec,
    element_bytes: int,
    quantization: Quantization | None,
    device: str,
    *,
    is_mxfp4: bool = False,
) -> int:
    """Return about how many bytes the weights of a model take.

    Args:
        spec, element_bytes, quantization, is_mxfp4: see `triton_bytes`.
        device: "cpu", or "cuda" for Triton's kernels.
    """
    if device == "cuda":
        return triton_bytes(spec, element_bytes, quantization, is_mxfp4=is_mxfp4)
    return estimate_parameters(spec).num_bytes(element_bytes, quantization, is_mxfp4=is_mxfp4)


def triton_bytes(
    spec: ModelSpec | HostedSpec, element_bytes: int, quantization: Quantization | None, *, is_mxfp4: bool = False
) -> int:
    """Return the bytes of a model's weights with Triton's kernels, which have their own layout of quantised weights.

    Args:
        spec: specification of the model.
        element_bytes: bytes of an element of the weights' dtype.
        quantization: rounding of the weights of linear layers; a rounded head is there beside a tied table.
        is_mxfp4: see `ParameterCounts.num_bytes`.
    """
    if quantization is None or isinstance(spec, HostedSpec):
        return estimate_parameters(spec).num_bytes(element_bytes, quantization, is_mxfp4=is_mxfp4)
    tables = _embedding_size(spec) + _other_tables_size(spec)
    head = Matrix(_embedding_size(spec) // spec.width, spec.width, min_bits=6)
    return tables * element_bytes + sum(
        int(matrix.size * MXFP4_BYTES)
        if is_mxfp4 and matrix.is_expert
        else matrix.triton_bytes(element_bytes, quantization)
        for matrix in (head, *_projections(spec))
    )


def layer_parameters(layer: LayerSpec, width: int) -> int:
    """Return the number of parameters of a layer in a model of `width`."""
    return sum(matrix.size for matrix in _layer(layer, width))


def _embedding_size(spec: ModelSpec) -> int:
    return 0 if spec.is_mtp else spec.vocab_size * spec.width


def _other_tables_size(spec: ModelSpec) -> int:
    """Return the number of parameters of the tables of positions and of per-layer inputs."""
    inputs = spec.per_layer_inputs
    per_layer = 0 if inputs is None else inputs.vocab_size * len(spec.layers) * inputs.width
    return per_layer + spec.num_positions * spec.width


def _projections(spec: ModelSpec) -> Iterator[Matrix]:
    """Yield all matrices except tables and the head."""
    for layer in spec.layers:
        yield from _layer(layer, spec.width)
    if spec.is_mtp:
        yield Matrix(spec.width, 2 * spec.width)
    if spec.per_layer_inputs is not None:
        # One projection of the embedding; a gate and a projection in each layer.
        columns = len(spec.layers) * spec.per_layer_inputs.width
        yield Matrix(2 * columns, spec.width)
        yield Matrix(len(spec.layers) * spec.width, spec.per_layer_inputs.width)
    if spec.alt_up is not None:
        # Projections of the other hidden states at both ends, the branches beside mixers, and coefficients.
        count = spec.alt_up.num_streams
        yield Matrix(2 * (count - 1) * spec.width, spec.width)
        yield Matrix(len(spec.layers) * (count**2 + count), count, min_bits=8)
        yield Matrix(len(spec.layers) * count, spec.width, min_bits=8)
        yield Matrix(len(spec.layers) * spec.alt_up.low_rank, spec.width)
        yield Matrix(len(spec.layers) * spec.width, spec.alt_up.low_rank)


def _layer(layer: LayerSpec, width: int) -> Iterator[Matrix]:
    for part in layer.parts:
        yield from _mixer(part, width)
    if layer.ffn is not None:
        yield from _ffn(layer.ffn, width)


def _mixer(mixer: Mixer, width: int) -> Iterator[Matrix]:
    match mixer:
        case Attention():
            # The output gate is as large as the queries.
            num_heads = mixer.num_heads * (2 if mixer.output_gate else 1)
            num_kv_heads = 0 if mixer.source is not None else 2 * mixer.num_kv_heads
            yield Matrix((num_heads + num_kv_heads) * mixer.head_dim, width)
            yield Matrix(width, mixer.num_heads * mixer.head_dim)
        case ShortConv():
            yield Matrix(3 * mixer.num_channels, width)
            yield Matrix(width, mixer.num_channels)
        case Mamba2():
            # Gate, convolution input and step sizes.
            yield Matrix(mixer.inner + mixer.num_channels + mixer.num_heads, width, min_bits=8)
            yield Matrix(width, mixer.inner)
        case GatedDeltaNet():
            # Convolution input, output gate and two gates for each head.
            yield Matrix(mixer.num_channels + mixer.inner + 2 * mixer.num_value_heads, width, min_bits=8)
            yield Matrix(width, mixer.inner)


def _ffn(ffn: FFN, width: int) -> Iterator[Matrix]:
    match ffn:
        case GatedMLP():
            yield from _mlp(2 * ffn.width, ffn.width, width)
        case PlainMLP():
            yield from _mlp(ffn.width, ffn.width, width)
        case Experts():
            yield Matrix(ffn.num_experts, width, min_bits=8)
            yield from _mlp(ffn.gate_up_width, ffn.width, width, ffn.num_local, is_expert=True)
            if ffn.shared is not None:
                yield from _ffn(ffn.shared, width)
                if ffn.shared_gate:
                    yield Matrix(1, width, min_bits=8)
        case MLPBesideExperts():
            yield from _ffn(ffn.mlp, width)
            yield from _ffn(ffn.experts, width)


def _mlp(num_rows: int, ffn_width: int, width: int, count: int = 1, *, is_expert: bool = False) -> Iterator[Matrix]:
    """Yield the first projections, of `num_rows` each, and the last projections of `count` MLPs."""
    yield Matrix(count * num_rows, width, is_expert=is_expert)
    yield Matrix(count * width, ffn_width, is_expert=is_expert, is_down=True)
