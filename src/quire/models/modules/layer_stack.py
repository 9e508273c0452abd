"""The layers of a decoder, run one by one if the backend has no fused layers for the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from quire.distributed.rank_group import RankGroup
from quire.models.modules.alt_up import AltUpEnds
from quire.models.modules.blocks import OutputRows, SelectedRows
from quire.models.modules.experts import ExpertsBlock, MLPBesideExpertsBlock
from quire.models.modules.image_attention import ImageAttention, ImageAttentionBatch
from quire.models.modules.layers import Layer, input_kind, make_input, make_layer, packed_layers
from quire.models.modules.norms import LearnedNorm
from quire.models.modules.rope import RotaryEmbedding, query_scales
from quire.models.modules.weight_slots import WeightSlots, nested
from quire.models.specs.norm_spec import LayerNorm
from quire.models.specs.rotations import Rope
from quire.models.specs.spec import ModelSpec, RMSNorm
from quire.ops.interface.fused_layers import FusedLayers, FusesExperts, FusesLayers
from quire.ops.interface.ops import AttentionBatch, Ops, PagedKV, PagedStates, Rotation, StateBatch
from quire.ops.interface.shared_ranks import SharedMemoryRanks


class LayerStack:
    """The layers of a decoder with their weights, and the inputs that a step gives to their mixers."""

    def __init__(
        self,
        spec: ModelSpec,
        new_norm: Callable[[RMSNorm | LayerNorm], LearnedNorm],
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        ranks: RankGroup | None = None,
    ) -> None:
        self._spec, self._ops, self._ranks = spec, ops, ranks
        # Kinds of inputs of mixers: the step of a cache group and, for attention, a rotation and a temperature.
        mixers_of_all = (mixer for layer in spec.layers for mixer in layer.parts)
        self._inputs = list(dict.fromkeys(map(input_kind, mixers_of_all, chain.from_iterable(spec.cache_positions))))
        # From the last cached layer on, only output rows are computed, with an attention step of their own.
        last = self._last_cached_layer = spec.last_cached_layer
        tail = {
            input_kind(*part)
            for layer, cache_positions in zip(spec.layers[last:], spec.cache_positions[last:], strict=True)
            for part in zip(layer.parts, cache_positions, strict=True)
        }
        self._tail_inputs = [kind if kind in tail and kind[1] is not None else None for kind in self._inputs]
        rope_keys = dict.fromkeys(rope_key for _, rope_key, _ in self._inputs if rope_key is not None)
        sections = spec.image_rows.sections
        self.rotations = {rope_key: RotaryEmbedding(*rope_key, dtype, device, sections) for rope_key in rope_keys}
        self._temperatures = [
            *dict.fromkeys(temperature for _, _, temperature in self._inputs if temperature is not None)
        ]
        self._layers: list[Layer] = []
        self.slots: WeightSlots = {}
        self._ends: AltUpEnds | None = None
        if spec.alt_up is not None:
            self._ends = AltUpEnds(spec.alt_up, spec.width, ops)
            self.slots |= nested(alt_up=self._ends.slots)
        for idx in range(len(spec.layers)):
            layer, layer_slots = make_layer(spec, idx, self._inputs, new_norm, ops, dtype, device, ranks)
            self._layers.append(layer)
            self.slots |= nested(**{f"layers.{idx}": layer_slots})

    def picks_within(self, num_layers: int) -> bool:
        """Return whether only output rows are computed from one of the first layers on."""
        return self._last_cached_layer < num_layers

    def fuse(self, ops: FusesLayers) -> FusedLayers | None:
        """Return the backend's fused layers; None if it cannot fuse them."""
        layers = packed_layers(self._spec, self._layers, self._inputs, list(self.rotations))
        if layers is None or self._ranks is None:
            return None if layers is None else ops.fuse_layers(layers)
        transport = self._ranks.transport
        return ops.fuse_layers(layers, transport) if isinstance(transport, SharedMemoryRanks) else None

    def fuse_experts(self, ops: FusesExperts) -> None:
        """Ask the backend for fused experts in each layer."""
        for layer in self._layers:
            if isinstance(layer.ffn, ExpertsBlock | MLPBesideExpertsBlock):
                layer.ffn.fuse(ops)

    def fuse_adapted_experts(self, ops: FusesExperts) -> None:
        """Ask the backend for fused experts with adapters, once all layers take adapters."""
        for layer in self._layers:
            if isinstance(layer.ffn, ExpertsBlock | MLPBesideExpertsBlock):
                layer.ffn.fuse_adapted(ops)

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        rotations: Mapping[tuple[Rope | None, int], Rotation],
        groups: Sequence[AttentionBatch | StateBatch],
        storages: Sequence[PagedKV | PagedStates],
        per_layer: Tensor | None = None,
        output_rows: OutputRows | None = None,
        additions: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Run the layers; keys, values and states are stored.

        `additions` are rows, [M] of int64, and what is added to them after the first layers, [M, D, E].
        """
        scales = {temperature: query_scales(temperature, positions) for temperature in self._temperatures}
        steps = [self._step(batch, storage) for batch, storage in zip(groups, storages, strict=True)]
        inputs = [make_input(kind, steps, rotations, scales) for kind in self._inputs]
        predicted: Tensor | None = None
        if self._ends is not None:
            x = self._ends.begin(x)
        for idx, (mixer_norm, mixers, ffn_norm, ffn, gate, alt_up, scale) in enumerate(self._layers):
            if alt_up is not None:
                predicted = alt_up.predict(x)
                x = predicted[:, 0]
            normed = x if mixer_norm is None else mixer_norm(x)
            if alt_up is not None:
                x = alt_up.with_low_rank(normed, x)
            if output_rows is None or idx != self._last_cached_layer:
                for mixer, input_idx in mixers:
                    x = mixer(normed, x, inputs[input_idx])
            else:
                x, per_layer, tail = self._pick(output_rows, x, per_layer, storages)
                predicted = None if predicted is None else predicted.index_select(0, output_rows.rows)
                for mixer, input_idx in mixers:
                    x = mixer(normed, x, inputs[input_idx], SelectedRows(output_rows.rows, tail[input_idx]))
                if not len(x):
                    return x
                inputs = tail
            if alt_up is not None:
                x = alt_up.halved(x)
            if ffn is not None:
                x = ffn(x if ffn_norm is None else ffn_norm(x), x)
            if gate is not None and per_layer is not None:
                x = gate(x, per_layer[:, idx])
            if alt_up is not None and predicted is not None and per_layer is not None:
                x = alt_up.correct(predicted, x, per_layer[:, idx])
            if scale is not None:
                x = scale(x)
            if additions is not None and idx < additions[1].shape[1]:
                x = x.index_add(0, additions[0], additions[1][:, idx])
        return x if self._ends is None else self._ends.end(x)

    def _pick(
        self, output_rows: OutputRows, x: Tensor, per_layer: Tensor | None, storages: Sequence[PagedKV | PagedStates]
    ) -> tuple[Tensor, Tensor | None, list[Any]]:
        """Return the output rows of `x` [T, E] and `per_layer` [T, L, P], and the inputs of mixers for these rows."""
        x = x.index_select(0, output_rows.rows)
        per_layer = None if per_layer is None else per_layer.index_select(0, output_rows.rows)
        if not len(x):
            return x, per_layer, [None] * len(self._inputs)
        kinds = [kind for kind in self._tail_inputs if kind is not None]
        steps = {idx: self._step(output_rows.groups[idx], storages[idx]) for idx, _, _ in kinds}
        rotations = {
            rope_key: self.rotations[rope_key](output_rows.positions)
            for _, rope_key, _ in kinds
            if rope_key is not None
        }
        scales = {
            temperature: query_scales(temperature, output_rows.positions)
            for _, _, temperature in kinds
            if temperature is not None
        }
        tail = [None if kind is None else make_input(kind, steps, rotations, scales) for kind in self._tail_inputs]
        return x, per_layer, tail

    def _step(self, batch: AttentionBatch | StateBatch, storage: Any) -> Any:
        match batch:
            case ImageAttentionBatch():
                return ImageAttention(self._ops.step_attention(batch, storage), batch, storage)
            case AttentionBatch():
                return self._ops.step_attention(batch, storage)
            case StateBatch():
                return self._ops.step_states(batch, storage)
