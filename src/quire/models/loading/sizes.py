"""Checks of the sizes in a configuration against the files, before tensors of these sizes are allocated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from quire.errors import CheckpointError
from quire.models.specs.encoder_spec import EncoderSpec
from quire.models.specs.spec import (
    Attention,
    GatedDeltaNet,
    GatedMLP,
    Mamba2,
    Mixer,
    MLPBesideExperts,
    ModelSpec,
    PlainMLP,
    ShortConv,
    experts_of,
)
from quire.models.specs.vision_spec import JoinedSquares, VisionSpec
from quire.models.tensors.stored_tensor import StoredTensor


def check_sizes(spec: ModelSpec | EncoderSpec | VisionSpec, tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse a model that is larger than its stored tensors.

    Exact shapes are checked when weights are loaded. Here it is enough that no tensor is allocated that is larger than
    all stored ones: a size is at most the longest stored dimension, and each layer needs a tensor.

    Raises:
        CheckpointError: a size is too large; the message names it, and the largest stored size.
    """
    if len(spec.layers) > len(tensors):
        raise CheckpointError(
            f"config.json: num_hidden_layers is {len(spec.layers)}, but only {len(tensors)} tensors are stored",
            field="num_hidden_layers",
        )
    longest = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    largest = max((prod(tensor.shape) for tensor in tensors.values()), default=0)
    sizes: list[tuple[str, int, int]] = []
    if isinstance(spec, VisionSpec):
        sizes += ((name, size, longest) for name, size in _vision_sizes(spec))
    elif isinstance(spec, EncoderSpec):
        sizes += ((name, size, longest) for name, size in _encoder_sizes(spec))
    else:
        sizes += (*_sizes(spec, longest), *((*values, largest) for values in _convolutions(spec)))
    if not isinstance(spec, VisionSpec):
        sizes.append(("num_labels", 0 if spec.classifier is None else len(spec.classifier.labels), longest))
        sizes += (("out_features", layer.width, longest) for layer in spec.dense)
    for name, size, most in sizes:
        if size > most:
            raise CheckpointError(f"config.json: {name} is {size:,}, but the largest that is stored has {most:,}")


def _vision_sizes(spec: VisionSpec) -> Iterator[tuple[str, int]]:
    """Yield sizes that must be dimensions of stored tensors."""
    yield "vision_config.hidden_size", spec.width
    yield "vision_config.intermediate_size", max(layer.mlp.width for layer in spec.layers)
    yield "vision_config.num_position_embeddings", spec.table_side**2
    if isinstance(spec.merger, JoinedSquares):
        yield "vision_config.hidden_size of a merged square", spec.width * spec.merge_size**2


def _encoder_sizes(spec: EncoderSpec) -> Iterator[tuple[str, int]]:
    """Yield sizes that must be dimensions of stored tensors."""
    yield "vocab_size", spec.vocab_size
    yield "hidden_size", spec.width
    yield "max_position_embeddings", spec.num_positions
    yield "type_vocab_size", spec.num_token_types
    yield "hidden_size of heads", max(layer.attention.num_heads * layer.attention.head_dim for layer in spec.layers)
    yield "intermediate_size", max(layer.mlp.width for layer in spec.layers)


def _sizes(spec: ModelSpec, longest: int) -> Iterator[tuple[str, int, int]]:
    """Yield sizes that must be dimensions of stored tensors, with their limit."""
    yield "vocab_size", spec.vocab_size, longest
    yield "hidden_size", spec.width, longest
    yield "max_position_embeddings", spec.num_positions, longest
    if spec.per_layer_inputs is not None:
        yield "vocab_size_per_layer_input", spec.per_layer_inputs.vocab_size, longest
        yield "hidden_size_per_layer_input", spec.per_layer_inputs.width, longest
    if spec.alt_up is not None:
        yield "laurel_rank", spec.alt_up.low_rank, longest
    for layer in {*spec.layers}:
        for mixer in layer.parts:
            for name, size in _mixer_sizes(mixer):
                yield name, size, longest
        experts, mlp = experts_of(layer.ffn), layer.ffn.mlp if isinstance(layer.ffn, MLPBesideExperts) else layer.ffn
        if isinstance(mlp, GatedMLP | PlainMLP):
            yield "intermediate_size", mlp.width, longest
        if experts is not None:
            yield "num_experts", experts.num_experts, longest
            yield "moe_intermediate_size", max(experts.width, experts.shared_width), longest


def _mixer_sizes(mixer: Mixer) -> Iterator[tuple[str, int]]:
    match mixer:
        case Attention():
            yield "num_attention_heads times head_dim", mixer.num_heads * mixer.head_dim
            yield "num_key_value_heads times head_dim", mixer.num_kv_heads * mixer.head_dim
        case ShortConv():
            yield "channels of a convolution", mixer.num_channels
        case Mamba2():
            yield "channels of a state", mixer.num_heads * mixer.head_dim + mixer.num_groups * mixer.state_dim
        case GatedDeltaNet():
            yield "channels of keys", mixer.num_key_heads * mixer.key_dim
            yield "channels of values", mixer.num_value_heads * mixer.value_dim


def _convolutions(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    """Yield the numbers of values of convolutions."""
    name = "kernel times channels of a convolution"
    for layer in {*spec.layers}:
        for mixer in layer.parts:
            if isinstance(mixer, ShortConv):
                yield name, mixer.kernel * mixer.num_channels
            elif isinstance(mixer, Mamba2):
                yield name, mixer.kernel * mixer.num_heads * mixer.head_dim
            elif isinstance(mixer, GatedDeltaNet):
                yield name, mixer.kernel * mixer.num_value_heads * mixer.value_dim
