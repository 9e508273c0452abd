"""The memory of a step on a GPU, which the engine measures at start, estimated from a `ModelSpec`.

Tensors count that are alive at the same time with Triton's kernels, in the steps that the engine measures: the largest
prefill, and decodes of `max_num_seqs` sequences with all options of sampling. Each formula names its tensors in the
order in which they are made; `tests/capacity/test_step_memory.py` compares it with
the live tensors of real steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from quire.models.specs.hosted_spec import HostedSpec
from quire.models.specs.recurrent_spec import GatedDeltaNet, Mamba2, ShortConv
from quire.models.specs.spec import (
    FFN,
    Attention,
    Experts,
    GatedMLP,
    LayerSpec,
    Mixer,
    MLPBesideExperts,
    ModelSpec,
    PlainMLP,
)
from quire.models.specs.vision_spec import JoinedSquares, LayerPieces, VisionSpec

# Bytes of float32 and int64.
WIDE: Final = 4
INDEX: Final = 8
# Inputs of a rounded row that share a scale, and the bytes of these inputs in float16 and their scale.
ROUNDED_GROUP: Final = 32
ROUNDED_GROUP_BYTES: Final = ROUNDED_GROUP * 2 + WIDE
# Bytes of the parameters of a row's token: id, position and slot.
ROW_BYTES: Final = 3 * INDEX
# Bytes for each logit with `typical_p`. In float32: the logits, a copy for the device sampler, the raw logits for
# log probabilities, and a copy to filter. Besides, in float64, while it sorts: surprisals, probabilities, distances,
# and the sorted distances with their indices; while it sums: surprisals, probabilities, indices, sorted probabilities,
# sums and differences.
COPIES: Final = 4 * WIDE
SORTING: Final = 4 * 8 + INDEX
SUMMING: Final = 5 * 8 + INDEX
# Scratch memory of torch's sort on a GPU (`SortStable.cu`): for many rows, initial indices, and a second copy of values
# and indices; few rows are sorted together, by pairs of an index and a row.
SORT_SCRATCH: Final = 24
SORT_SCRATCH_OF_FEW: Final = 40
MANY_ROWS: Final = 128
# Rows of a chunk of a recurrence.
CHUNK_ROWS: Final = 64
# Bytes of a patch's place: row and column, and in another grid their neighbours and weights.
PLACE_BYTES: Final = 10 * INDEX


class StepSizes(NamedTuple):
    """The largest steps.

    Args:
        max_num_batched_tokens: tokens of a step.
        max_num_seqs: sequences of a step.
        max_model_len: tokens of a sequence.
        num_draft_tokens: drafts of a sequence.
        element_bytes: bytes of an element of the weights' dtype.
        is_rounded: weights are rounded, so that products are summed in float32.
        num_ranks: GPUs that share the model.
        has_sort_scratch: whether sorts have scratch memory, as on a GPU.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    num_draft_tokens: int = 0
    element_bytes: int = 2
    is_rounded: bool = False
    num_ranks: int = 1
    has_sort_scratch: bool = True

    @property
    def num_prefill_rows(self) -> int:
        """Tokens of the largest prefill step."""
        return min(self.max_num_batched_tokens, self.max_num_seqs * self.max_model_len)

    @property
    def num_decode_rows(self) -> int:
        """Rows of a decode step: one for each sequence and each of its drafts."""
        most = self.max_num_batched_tokens // self.max_num_seqs - 1
        return self.max_num_seqs * (1 + max(0, min(self.num_draft_tokens, most, self.max_model_len - 2)))


def step_bytes(spec: ModelSpec | HostedSpec, sizes: StepSizes) -> int:
    """Return the most bytes of a step besides weights and KV cache, in tensors that are alive at the same time."""
    prefill = sizes.num_prefill_rows * _layers_bytes(spec, sizes, is_last=False)
    return max(prefill, sizes.num_decode_rows * max(_layers_bytes(spec, sizes), _sampling_bytes(spec, sizes)))


def captured_bytes(
    spec: ModelSpec | HostedSpec, sizes: StepSizes, num_rows: int, num_table_entries: int, *, makes_drafts: bool = False
) -> int:
    """Return the bytes of the tensors of captured decode steps; smaller steps share the largest step's.

    The driver's memory for each captured step is unknown without a GPU.
    """
    outputs, live = spec.width * sizes.element_bytes, _layers_bytes(spec, sizes)
    if sizes.num_ranks == 1:  # captured steps of ranks end before the head
        outputs += INDEX if makes_drafts else spec.vocab_size * WIDE
        live = max(live, _head_bytes(spec, sizes))
    return num_rows * (outputs + live) + num_table_entries * INDEX


class ImageMemory(NamedTuple):
    """The memory of images besides the weights of their encoder.

    Args:
        spec: the encoder.
        num_patches: number of patches of the largest image.
        feature_bytes: features that are kept in memory.
    """

    spec: VisionSpec
    num_patches: int
    feature_bytes: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the largest image."""
        return self.num_patches // self.spec.merge_size**2

    def num_bytes(self, element_bytes: int) -> int:
        """Return the bytes of the largest image in the encoder and of features."""
        features = self.num_tokens * self.spec.num_features * self.spec.out_width * element_bytes
        return image_bytes(self.spec, self.num_patches, element_bytes) + max(features, self.feature_bytes)


def image_bytes(spec: VisionSpec, num_patches: int, element_bytes: int) -> int:
    """Return the most bytes of an image on its way through an encoder: tensors that are alive at the same time.

    Args:
        spec: the encoder.
        num_patches: number of patches of the image.
        element_bytes: bytes of an element of the weights' dtype.
    """
    values, width, merged = math.prod(spec.patch_shape), spec.width, spec.merge_size**2
    layer = spec.layers[0]
    rotation = 0 if spec.rope_theta is None else 2 * layer.attention.head_dim * element_bytes
    # Values in the dtype and their projection; or the projection and positions, with their terms in float32.
    start = element_bytes * width + max(element_bytes * values, 3 * WIDE * width if spec.is_resampled else 0)
    # Queries, keys and values, rotated ones, and results of heads; or hidden states within a layer, normed and summed,
    # products and activations; or, of a merger, normed hidden states, products and activations, and features.
    heads, pieces = layer.attention.num_heads * layer.attention.head_dim, LayerPieces.of(spec, num_patches)
    products = (3 if layer.mlp.gated else 2) * layer.mlp.width
    of_merger = 2 * width if isinstance(spec.merger, JoinedSquares) else width / merged
    rows = max(3 * width + products, width + of_merger + spec.out_width / merged)
    working = max(6 * heads, rows)
    if pieces.is_divided:
        # Queries, keys and values of all rows, and results of heads; and those of a piece, also in the order of rows.
        of_heads, of_rows = pieces.piece_heads / pieces.num_heads, pieces.piece_rows / num_patches
        working = 4 * heads + max(7 * heads * of_heads, rows * of_rows)
    layers = element_bytes * (width + working + spec.num_features * spec.out_width / merged)
    # The values of patches live as long as the request.
    return math.ceil(num_patches * (WIDE * values + PLACE_BYTES + rotation + max(start, layers)))


# ---- bytes of a row ----


def _sampling_bytes(spec: ModelSpec | HostedSpec, sizes: StepSizes) -> int:
    num_rows = sizes.num_decode_rows
    scratch = 0 if not sizes.has_sort_scratch else SORT_SCRATCH if num_rows >= MANY_ROWS else SORT_SCRATCH_OF_FEW
    # Rows of drafts are not copied for the device sampler.
    copies = COPIES if num_rows == sizes.max_num_seqs else COPIES - WIDE
    sampling = spec.vocab_size * (copies + max(SORTING + scratch, SUMMING))
    return spec.width * sizes.element_bytes + max(sampling, _head_bytes(spec, sizes))


def _head_bytes(spec: ModelSpec | HostedSpec, sizes: StepSizes) -> int:
    """Hidden states and normed ones; products, then float32 logits. A rounded head has float32 rows and logits."""
    element = sizes.element_bytes
    if sizes.is_rounded:
        product = _product(spec.vocab_size, spec.width, sizes._replace(element_bytes=WIDE))
        return spec.width * (element + WIDE) + product
    products = max(_product(spec.vocab_size, spec.width, sizes), spec.vocab_size * (element + WIDE))
    return 2 * spec.width * element + products


def _layers_bytes(spec: ModelSpec | HostedSpec, sizes: StepSizes, *, is_last: bool = True) -> int:
    """Return the bytes of a row at the peak of the layers."""
    element = sizes.element_bytes
    if isinstance(spec, HostedSpec):
        return _hosted_bytes(spec, element)
    head_dims = {
        (part.rope, part.head_dim) for layer in spec.layers for part in layer.parts if isinstance(part, Attention)
    }
    # Embedding and residual; cosines and sines of each rotation.
    live_bytes = ROW_BYTES + (2 * spec.width + sum(2 * head_dim for _, head_dim in head_dims)) * element
    if spec.is_mtp:
        # Hidden states of the target, also normed, and moved by a row; embeddings, and pairs of both.
        live_bytes += 6 * spec.width * element
    # Per-layer inputs, which are sums of tensors of the same size.
    layer_inputs = 0 if spec.per_layer_inputs is None else len(spec.layers) * spec.per_layer_inputs.width * element
    live_bytes += layer_inputs
    if spec.alt_up is not None:
        # Hidden states, their predictions and their corrections.
        live_bytes += 3 * spec.alt_up.num_streams * spec.width * element
    end = len(spec.layers) if is_last else spec.last_cached_layer
    peaks = [live_bytes + 4 * layer_inputs]
    for idx, layer in enumerate(spec.layers[: end + 1]):
        peaks += [live_bytes + peak for peak in _mixer_peaks(layer, spec.width, sizes)]
        if idx < end:
            peaks += [live_bytes + peak for peak in _ffn_peaks(layer, spec.width, sizes)]
    return max(peaks)


def _hosted_bytes(spec: HostedSpec, element_bytes: int) -> int:
    """Return the bytes of a row in modules of transformers, which keep intermediate results until a module returns.

    Hidden state, residual and normed one, the latter in float32; three products of the widest layer; or queries, keys
    and values, rotated ones in halves and whole, packed ones, and what attention returns.
    """
    heads = max((call.num_heads + 2 * call.num_kv_heads) * call.head_dim for call in spec.attention)
    hidden = ROW_BYTES + spec.width * (2 * element_bytes + 2 * WIDE)
    return hidden + max(3 * spec.most_columns, 6 * heads) * element_bytes


def _product(num_columns: int, width: int, sizes: StepSizes) -> int:
    """Return the bytes of a product; with rounded weights, including rounded rows, their scales, and float32 sums."""
    if not sizes.is_rounded:
        return num_columns * sizes.element_bytes
    return num_columns * (sizes.element_bytes + WIDE) + -(-width // ROUNDED_GROUP) * ROUNDED_GROUP_BYTES


def _added(layer: LayerSpec, in_width: int, width: int, scale: float, sizes: StepSizes) -> int:
    """Return the bytes of the last product of half a layer, and of its norm, until it is added to the residual."""
    element = sizes.element_bytes
    product = _product(width, in_width, sizes)
    if sizes.num_ranks > 1:  # parts of two ranks, or slices of all, and their float32 sum
        product += width * (2 * element + WIDE)
    if layer.post_norm is not None:
        return max(product, 3 * width * element)
    return product if scale == 1.0 else max(product, 2 * width * element)


def _mixer_peaks(layer: LayerSpec, width: int, sizes: StepSizes) -> Iterator[int]:
    element = sizes.element_bytes
    normed = width * element
    for part in layer.parts:
        inner, peaks = _mixer(part, width, sizes)
        scale = layer.mixer_scale
        yield normed + max(*peaks, 2 * inner * element + _added(layer, inner, width, scale, sizes))


def _mixer(mixer: Mixer, width: int, sizes: StepSizes) -> tuple[int, Sequence[int]]:
    """Return the input width of a mixer's last product, and the bytes of the mixer's peaks before it."""
    element = sizes.element_bytes
    match mixer:
        case Attention():
            queries = mixer.num_heads * mixer.head_dim
            projected = queries + (0 if mixer.source is not None else 2 * mixer.num_kv_heads * mixer.head_dim)
            product = _product(projected, width, sizes)
            # Queries, keys and values; prepared queries; the attention's output; gates and the gated output.
            gathered = (4 if mixer.output_gate else 2) * queries * element
            return queries, (product, (projected + queries) * element, gathered)
        case ShortConv():
            # Three projections; their product; the convolution's output.
            product = _product(3 * mixer.num_channels, width, sizes)
            return mixer.num_channels, (product, 5 * mixer.num_channels * element)
        case Mamba2():
            projected = mixer.inner + mixer.num_channels + mixer.num_heads
            live_bytes = (projected + mixer.num_channels) * element
            # Outputs in float32; decays of chunks, then gates.
            outputs, decays = mixer.inner * WIDE, 2 * mixer.num_heads * WIDE
            scaled = 0 if mixer.scales[0] == 1.0 else outputs
            gated = 2 * outputs if mixer.norm is None else max(2 * scaled, scaled + mixer.inner * element)
            return mixer.inner, (_product(projected, width, sizes), live_bytes + outputs + max(decays, gated))
        case GatedDeltaNet():
            projected = mixer.num_channels + mixer.inner + 2 * mixer.num_value_heads
            keys = mixer.num_key_heads * mixer.key_dim
            live_bytes = (projected + mixer.num_channels) * element + 2 * keys * WIDE
            # Scaled queries and outputs, in float32; tensors of chunks, then normed outputs and gates.
            outputs = (keys + mixer.inner) * WIDE
            of_chunks = mixer.num_key_heads * 4 * mixer.key_dim * 2
            of_chunks += mixer.num_value_heads * (4 * CHUNK_ROWS * 2 + 3 * WIDE)
            product = _product(projected, width, sizes)
            return mixer.inner, (product, live_bytes + outputs + of_chunks, live_bytes + mixer.inner * WIDE * 4)


def _ffn_peaks(layer: LayerSpec, width: int, sizes: StepSizes) -> Iterator[int]:
    # The mixer's normed rows are still alive.
    normed = 2 * width * sizes.element_bytes
    for peak in () if layer.ffn is None else _ffn(layer.ffn, layer, width, sizes):
        yield normed + peak


def _ffn(ffn: FFN, layer: LayerSpec, width: int, sizes: StepSizes) -> Iterator[int]:
    element = sizes.element_bytes
    match ffn:
        case GatedMLP() | PlainMLP():
            yield from _mlp(ffn, width, sizes)
            yield ffn.width * element + _added(layer, ffn.width, width, layer.ffn_scale, sizes)
        case Experts():
            yield from _experts(ffn, width, sizes)
        case MLPBesideExperts():
            # The output of the MLP is alive while experts run, which have their own normed rows.
            yield from _mlp(ffn.mlp, width, sizes)
            yield from (2 * width * element + peak for peak in _experts(ffn.experts, width, sizes))


def _mlp(mlp: GatedMLP | PlainMLP, width: int, sizes: StepSizes) -> Iterator[int]:
    """Yield the bytes of the first product, of gates and ups if there are gates, and of it and the activated values."""
    num_columns = (2 if isinstance(mlp, GatedMLP) else 1) * mlp.width
    yield _product(num_columns, width, sizes)
    yield (num_columns + mlp.width) * sizes.element_bytes


def _experts(experts: Experts, width: int, sizes: StepSizes) -> Iterator[int]:
    element, num_chosen = sizes.element_bytes, experts.num_chosen
    sums = width * WIDE
    if experts.shared is not None:
        yield from (sums + peak for peak in _mlp(experts.shared, width, sizes))
    # Chosen experts, their scores, and the rows in the order of experts.
    live_bytes = sums + num_chosen * (4 * INDEX + 3 * WIDE)
    inner = experts.width * element
    # Each chosen expert: gates and ups, gated values, and the output in float32.
    yield live_bytes + num_chosen * 3 * inner
    yield live_bytes + num_chosen * (inner + width * WIDE) + sums
