"""One decoder for all families: it runs what a `ModelSpec` says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from quire.distributed.rank_group import RankGroup
from quire.models.blocks import GatedMLPBlock, OutputRows, SelectedRows
from quire.models.embedding import RowsOfRanks, TokenEmbedding
from quire.models.layers import Layer, input_kind, make_input, make_layer, packed_layers
from quire.models.norms import Norm
from quire.models.per_layer_inputs import PerLayerEmbedding
from quire.models.projections import Projection
from quire.models.rope import RotaryEmbedding, query_scales
from quire.models.sharding import share_of
from quire.models.spec import LayerGroup, ModelSpec
from quire.models.weight_slots import WeightTable, nested
from quire.ops.adapted_linear import StepAdapters
from quire.ops.fused_layers import FusedLayers, FusesExperts, FusesLayers
from quire.ops.interface import AttentionBatch, Ops, PagedKV, PagedStates, StateBatch
from quire.ops.lora import LoraRows
from quire.ops.native_ranks import SharedMemoryRanks


class Decoder:
    """A decoder-only language model over paged memory.

    All that a step needs is an argument. Call it under `torch.inference_mode()`.

    Args:
        spec: specification of the model.
        ops: kernels.
        dtype: dtype of weights, hidden states and cache.
        ranks: ranks that share the model, of which this is one; the layers of `spec` are this rank's then. None for
            one process.

    Attributes:
        ops, spec, dtype, device: the arguments of these names.
        weights: the weights to load; the decoder runs when none is missing.
        step_adapters: adapters of the present step's rows, for layers that may have adapters.
        merged_adapter: digest of the adapter that is merged into the weights; None for none.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        ranks: RankGroup | None = None,
    ) -> None:
        self.spec = spec
        self._ranks = ranks
        self.ops = ops
        self.dtype = dtype
        self.device = device
        self.step_adapters = StepAdapters()
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()
        first, end = share_of(ranks).vocabulary(spec.vocab_size)
        self._widths = share_of(ranks).widths(spec.vocab_size)  # of the head, on each rank
        self._head = Projection(spec.width, end - first, False, ops, min_bits=6)
        self._embedding = TokenEmbedding(spec, self._head, ops, end - first)
        self._look_up: Callable[[Tensor], Tensor] = lambda input_ids: self._embedding.look_up(input_ids)
        if ranks is not None:
            self._look_up = RowsOfRanks(self._look_up, spec.vocab_size, ranks)
        new_norm = partial(Norm, width=spec.width, ops=ops, dtype=dtype, device=device)
        self._norm = new_norm(spec.norm)
        # Inputs of mixers in a step: the step of a cache group, and for attention a rotation.
        mixers_of_all = (mixer for layer in spec.layers for mixer in layer.parts)
        self._inputs = list(dict.fromkeys(map(input_kind, mixers_of_all, chain.from_iterable(spec.cache_positions))))
        # From the last cached layer on, only output rows are computed: their attention is another step's.
        last = self._last_cached_layer = spec.last_cached_layer
        tail = {
            input_kind(*part)
            for layer, cache_positions in zip(spec.layers[last:], spec.cache_positions[last:], strict=True)
            for part in zip(layer.parts, cache_positions, strict=True)
        }
        self._tail_inputs = [kind if kind in tail and kind[1] is not None else None for kind in self._inputs]
        rope_keys = dict.fromkeys(rope_key for _, rope_key, _ in self._inputs if rope_key is not None)
        self._rotations = {rope_key: RotaryEmbedding(*rope_key, dtype, device) for rope_key in rope_keys}
        self._temperatures = [
            *dict.fromkeys(temperature for _, _, temperature in self._inputs if temperature is not None)
        ]
        slots = {"embedding.weight": self._embedding.slot}
        self._per_layer_inputs: PerLayerEmbedding | None = None
        if spec.per_layer_inputs is not None:
            shape = len(spec.layers), spec.width
            self._per_layer_inputs = PerLayerEmbedding(spec.per_layer_inputs, *shape, ops, dtype, device, ranks)
            slots |= nested(per_layer_inputs=self._per_layer_inputs.slots)
        self._layers: list[Layer] = []
        for idx in range(len(spec.layers)):
            layer, layer_slots = make_layer(spec, idx, self._inputs, new_norm, ops, dtype, device, ranks)
            self._layers.append(layer)
            slots |= nested(**{f"layers.{idx}": layer_slots})
        self._fused: FusedLayers | None = None
        self._fused_adapted: FusedLayers | None = None
        self._fused_head: Callable[[Tensor], Tensor] | None = None
        slots |= nested(norm=self._norm.slots)
        if not spec.tied_head:
            slots |= nested(head=self._head.slots)
        self.merged_adapter: str | None = None
        self.weights = WeightTable(slots, dtype, device, self._fuse)

    @property
    def cache_groups(self) -> tuple[LayerGroup, ...]:
        """Layer groups, in the order of storages and attention batches."""
        return self.spec.cache_groups

    @property
    def kernels(self) -> str:
        """Name of the kernels."""
        return self.ops.name

    def _fuse(self) -> None:
        """Have the backend run layers, the end of the model, or the experts of a layer by one call where it can."""
        if isinstance(self.ops, FusesLayers):
            self._fused = self._fuse_layers(self.ops)
            self._fused_head = self.ops.fuse_norm(self._norm.row_norm, self._head.run)
        if isinstance(self.ops, FusesExperts):
            for layer in self._layers:
                if not isinstance(layer.ffn, GatedMLPBlock):
                    layer.ffn.fuse(self.ops)

    def _fuse_layers(self, ops: FusesLayers) -> FusedLayers | None:
        layers = packed_layers(self.spec, self._layers, self._inputs, list(self._rotations))
        if layers is None or self._ranks is None:
            return None if layers is None else ops.fuse_layers(layers)
        transport = self._ranks.transport
        return ops.fuse_layers(layers, transport) if isinstance(transport, SharedMemoryRanks) else None

    def fuse_adapted(self) -> None:
        """Have the backend run layers that take adapters by one call too, for steps with adapters."""
        if isinstance(self.ops, FusesLayers):
            self._fused_adapted = self._fuse_layers(self.ops)

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        groups: Sequence[AttentionBatch | StateBatch],
        storages: Sequence[PagedKV | PagedStates],
        given: tuple[Tensor, Tensor] | None = None,
        output_rows: OutputRows | None = None,
        adapters: tuple[LoraRows, LoraRows | None] | None = None,
    ) -> Tensor:
        """Run the layers over a step's rows; what they keep of the rows is stored on the way.

        After the mixer of the last cached layer, only output rows are computed.

        Args:
            input_ids: [T] of int64.
            positions: [T] of int64.
            groups: the step's part in each cache group.
            storages: one for each cache group.
            given: rows, [M] of int64, and embeddings [M, E] to take for them as they are, in place of the tokens' own.
            output_rows: rows whose hidden states are returned; None for all rows.
            adapters: rows that have an adapter, among all rows and among the output rows; None for no such row.

        Returns:
            Hidden states before the last norm, [T, E]; where `output_rows` are given, [R, E].
        """
        if adapters is not None or self.step_adapters.all is not None:
            self.step_adapters.begin(adapters)
        x = self._look_up(input_ids)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        if given is not None:
            x = x.index_copy(0, *given)
        per_layer = None if self._per_layer_inputs is None else self._per_layer_inputs(input_ids, x)
        rotations = {rope_key: rotate(positions) for rope_key, rotate in self._rotations.items()}
        fused = self._fused if adapters is None else self._fused_adapted
        if output_rows is None and fused is not None:
            hidden = fused(x, list(rotations.values()), groups, storages)
            if hidden is not None:
                return hidden
        scales = {temperature: query_scales(temperature, positions) for temperature in self._temperatures}
        steps = [self._step(batch, storage) for batch, storage in zip(groups, storages, strict=True)]
        inputs = [make_input(kind, steps, rotations, scales) for kind in self._inputs]
        for idx, (mixer_norm, mixers, ffn_norm, ffn, gate, scale) in enumerate(self._layers):
            normed = mixer_norm(x)
            if output_rows is None or idx != self._last_cached_layer:
                for mixer, input_idx in mixers:
                    x = mixer(normed, x, inputs[input_idx])
            else:
                x, per_layer, tail = self._pick(output_rows, x, per_layer, storages)
                for mixer, input_idx in mixers:
                    x = mixer(normed, x, inputs[input_idx], SelectedRows(output_rows.rows, tail[input_idx]))
                if not len(x):
                    return x
                inputs = tail
            x = ffn(ffn_norm(x), x)
            if gate is not None and per_layer is not None:
                x = gate(x, per_layer[:, idx])
            if scale is not None:
                x = scale(x)
        return x

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
            rope_key: self._rotations[rope_key](output_rows.positions)
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
            case AttentionBatch():
                return self.ops.step_attention(batch, storage)
            case StateBatch():
                return self.ops.step_states(batch, storage)

    def normed(self, hidden: Tensor) -> Tensor:
        """Return hidden states [R, E] after the last norm."""
        return self._norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, V], float32, of hidden states [R, E]; of ranks, on the first one."""
        ranks = self._ranks
        product = self._product(hidden) if ranks is None else ranks.head(hidden, self._product, self._widths)
        return self._as_logits(product)

    def likeliest(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the greatest logit [R] of each row of `hidden` [R, E] and its token [R]; each rank looks for its own.

        None without ranks, whose logits are there as a whole.
        """
        return None if self._ranks is None else self._ranks.likeliest(hidden, self._own_logits, self._widths)

    def _own_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of this rank's columns."""
        return self._as_logits(self._product(hidden))

    def _as_logits(self, product: Tensor) -> Tensor:
        """Return the head's product in float32, with the model's factor and cap."""
        logits = product.float()
        if self.spec.logit_scale != 1.0:
            logits *= self.spec.logit_scale
        cap = self.spec.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    @property
    def is_follower(self) -> bool:
        """True on a rank whose tokens are drawn on rank 0."""
        return self._ranks is not None and self._ranks.rank > 0

    def serve_head(self) -> None:
        """Take part in the logits of other rows that the first rank asks for, until it sends commands again."""
        assert self._ranks is not None, "one process has all logits"
        self._ranks.serve_head(self.spec.width, self.dtype, self._product, self._own_logits, self._widths)

    def _product(self, hidden: Tensor) -> Tensor:
        """Return the head's product [R, V] of hidden states [R, E]; of ranks, the columns of this one."""
        return self._head.run(self._norm(hidden)) if self._fused_head is None else self._fused_head(hidden)
