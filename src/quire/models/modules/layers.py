"""The layers of a decoder: blocks with their weights, and the kinds of inputs that a step gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quire.distributed.rank_group import RankGroup
from quire.models.modules.alt_up import AltUpBlock
from quire.models.modules.blocks import (
    AttentionBlock,
    AttentionInputs,
    GatedMLPBlock,
    LearnedScale,
    PlainMLPBlock,
    SelectedRows,
    SharedAttentionBlock,
)
from quire.models.modules.experts import ExpertsBlock, MLPBesideExpertsBlock, make_ffn
from quire.models.modules.norms import LearnedNorm
from quire.models.modules.per_layer_inputs import PerLayerGate
from quire.models.modules.projections import ResidualAdd
from quire.models.modules.recurrent import GatedDeltaNetBlock, Mamba2Block, ShortConvBlock
from quire.models.modules.weight_slots import WeightSlots, nested
from quire.models.specs.norm_spec import LayerNorm
from quire.models.specs.rotations import Rope, Temperature
from quire.models.specs.spec import Attention, GatedDeltaNet, Mamba2, Mixer, ModelSpec, Parallel, RMSNorm, ShortConv
from quire.ops.interface.fused_layers import PackedAttention, PackedLayer, PackedRecurrence
from quire.ops.interface.ops import Ops, Rotation

# A cache group and, of attention, the rotation with the head dim, and the temperature.
InputKind = tuple[int, tuple[Rope | None, int] | None, Temperature | None]


class MixerBlock(Protocol):
    """A mixer with its weights.

    Attributes:
        packed: weights for the fused kernels; None if the mixer has parts that they lack.
        slots: slots of its weights.
    """

    slots: WeightSlots

    @property
    def packed(self) -> PackedAttention | PackedRecurrence | None: ...

    def __call__(self, x: Tensor, residual: Tensor, inputs: Any, selected: SelectedRows | None = None, /) -> Tensor:
        """Return `residual + mixer(x)`, all [T, E], with the step's inputs for this kind of mixer.

        With selected rows, `residual` and the result are [R, E].
        """


class Layer(NamedTuple):
    """A layer with its weights.

    Args:
        mixer_norm: norm before the mixer, or None.
        mixers: parts of the mixer, each with the index of its kind of inputs.
        ffn_norm: norm before the feed-forward part, or None.
        ffn: feed-forward part, or None.
        gate: addition of the layer's own inputs, if it has any.
        alt_up: update of several hidden states, with the addition of the layer's own inputs; None for one.
        scale: factor of the layer's result, if it has one.
    """

    mixer_norm: LearnedNorm | None
    mixers: list[tuple[MixerBlock, int]]
    ffn_norm: LearnedNorm | None
    ffn: GatedMLPBlock | PlainMLPBlock | ExpertsBlock | MLPBesideExpertsBlock | None
    gate: PerLayerGate | None
    alt_up: AltUpBlock | None
    scale: LearnedScale | None


def make_layer(
    spec: ModelSpec,
    idx: int,
    inputs: Sequence[InputKind],
    new_norm: Callable[[RMSNorm | LayerNorm], LearnedNorm],
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    ranks: RankGroup | None = None,
) -> tuple[Layer, WeightSlots]:
    """Make a layer without weights, and the slots for these."""
    layer, cache_positions = spec.layers[idx], spec.cache_positions[idx]
    additions = [
        ResidualAdd(None if layer.post_norm is None else new_norm(layer.post_norm), scale, ranks)
        for scale in (layer.mixer_scale, layer.ffn_scale)
    ]
    if isinstance(layer.mixer, Parallel):
        assert additions[0].norm is None, "mixers side by side are added as they are"
        mixer_additions = [ResidualAdd(scale=additions[0].scale * scale, ranks=ranks) for scale in layer.mixer.scales]
        names = [f"mixer.{part_idx}" for part_idx in range(len(layer.parts))]
    else:
        num_mixers = len(layer.parts)
        mixer_additions, names = additions[:num_mixers], ["mixer"][:num_mixers]
    mixers = [
        _make_mixer(part, spec.width, layer_idx, addition, ops, dtype, device)
        for part, (_, layer_idx), addition in zip(layer.parts, cache_positions, mixer_additions, strict=True)
    ]
    input_idxs = [inputs.index(input_kind(*part)) for part in zip(layer.parts, cache_positions, strict=True)]
    halves = layer.mixer, layer.ffn
    mixer_norm, ffn_norm = (None if layer.norm is None or half is None else new_norm(layer.norm) for half in halves)
    ffn = None if layer.ffn is None else make_ffn(layer.ffn, spec.width, additions[1], ops, new_norm)
    named = {**dict(zip(names, mixers, strict=True)), "ffn": ffn, "mixer_norm": mixer_norm, "ffn_norm": ffn_norm}
    slots = nested(**{name: part.slots for name, part in named.items() if part is not None})
    gate = scale = None
    if spec.per_layer_inputs is not None:
        gate = PerLayerGate(spec.per_layer_inputs, spec.width, new_norm(spec.per_layer_inputs.norm), ops)
        slots |= nested(per_layer_gate=gate.slots)
    alt_up = None
    if spec.alt_up is not None:
        assert gate is not None, "a layer's own inputs are added to the other hidden states"
        alt_up, gate = AltUpBlock(spec.alt_up, spec.width, gate, ops, dtype, device), None
        slots |= nested(alt_up=alt_up.slots)
    if layer.learned_scale:
        scale = LearnedScale()
        slots |= nested(scale=scale.slots)
    return Layer(mixer_norm, [*zip(mixers, input_idxs, strict=True)], ffn_norm, ffn, gate, alt_up, scale), slots


def _make_mixer(
    mixer: Mixer,
    width: int,
    layer_idx: int,
    addition: ResidualAdd,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
) -> MixerBlock:
    arguments = (width, layer_idx, addition, ops)
    match mixer:
        case Attention():
            block = AttentionBlock if mixer.source is None else SharedAttentionBlock
            return block(mixer, *arguments, dtype, device)
        case ShortConv():
            return ShortConvBlock(mixer, *arguments, device)
        case Mamba2():
            return Mamba2Block(mixer, *arguments, device)
        case GatedDeltaNet():
            return GatedDeltaNetBlock(mixer, *arguments, device)


def packed_layers(
    spec: ModelSpec,
    layers: Sequence[Layer],
    inputs: Sequence[InputKind],
    rotations: Sequence[tuple[Rope | None, int]],
) -> list[PackedLayer] | None:
    """Return the layers' weights for the fused kernels; None if a layer has parts that they lack."""
    packed = []
    for layer, positions in zip(layers, spec.cache_positions, strict=True):
        mixer_norm, mixers, ffn_norm, ffn_block, gate, alt_up, scale = layer
        if not mixers or ffn_block is None:
            return None
        ((group_idx, layer_idx), *_), ((block, input_idx), *others) = positions, mixers
        _, rope_key, temperature = inputs[input_idx]
        mixer, ffn = block.packed, ffn_block.packed
        norms = [None if norm is None else norm.row_norm for norm in (mixer_norm, ffn_norm)]
        if (
            norms[0] is None
            or norms[1] is None
            or mixer is None
            or ffn is None
            or others
            or gate
            or alt_up
            or scale
            or temperature is not None
        ):
            return None
        rotation_idx = 0 if rope_key is None else rotations.index(rope_key)
        packed.append(PackedLayer(norms[0], mixer, group_idx, layer_idx, rotation_idx, norms[1], ffn))
    return packed


def make_input(
    kind: InputKind,
    steps: Mapping[int, Any] | Sequence[Any],
    rotations: Mapping[tuple[Rope | None, int], Rotation],
    scales: Mapping[Temperature, Tensor],
) -> Any:
    """Return a step's inputs for a kind of mixer: its cache group's step; rotation and query scales of attention."""
    group_idx, rope_key, temperature = kind
    if rope_key is None:
        return steps[group_idx]
    return AttentionInputs(rotations[rope_key], steps[group_idx], None if temperature is None else scales[temperature])


def input_kind(mixer: Mixer, cache_position: tuple[int, int]) -> InputKind:
    """Return a mixer's kind: mixers of one kind share their inputs in each step."""
    if not isinstance(mixer, Attention):
        return cache_position[0], None, None
    return cache_position[0], (mixer.rope, mixer.head_dim), mixer.temperature
