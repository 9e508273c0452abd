"""The decoder of all families, as a `ModelSpec` describes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from quire.distributed.rank_group import RankGroup
from quire.models.modules.blocks import OutputRows
from quire.models.modules.embedding import RowsOfRanks, TokenEmbedding
from quire.models.modules.image_attention import ImageAttentionBatch
from quire.models.modules.layer_stack import LayerStack
from quire.models.modules.norms import make_learned_norm
from quire.models.modules.per_layer_inputs import PerLayerEmbedding
from quire.models.modules.pooled_heads import PooledHeads
from quire.models.modules.projections import Projection
from quire.models.modules.weight_slots import WeightSlot, WeightTable, nested
from quire.models.specs.sharding import share_of
from quire.models.specs.spec import LayerGroup, ModelSpec
from quire.ops.interface.adapted_linear import StepAdapters
from quire.ops.interface.fused_layers import FusedLayers, FusesExperts, FusesLayers
from quire.ops.interface.lora import LoraRows
from quire.ops.interface.ops import AttentionBatch, Ops, PagedKV, PagedStates, RoundsInputs, StateBatch


class Decoder:
    """A decoder-only language model over paged memory.

    All that a step needs is an argument. Call it under `torch.inference_mode()`.

    Args:
        spec: specification of the model.
        ops: kernels.
        dtype: dtype of weights, hidden states and cache.
        ranks: ranks that share the model; `spec` has this rank's part of the layers then. None for one process.

    Attributes:
        ops, spec, dtype, device: the arguments of these names.
        heads: layers over pooled hidden states, on ranks with the last norm.
        weights: the weights to load; the decoder runs when none is missing.
        step_adapters: rows of the current step that have an adapter, for layers that take adapters.
        merged_adapter: digest of the adapter that is merged into the weights; None for none.
        replicas: ranks that each hold a full copy of this draft model; None otherwise.
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
        new_norm = partial(make_learned_norm, width=spec.width, ops=ops, dtype=dtype, device=device)
        self._norm = new_norm(spec.norm)
        slots = {"embedding.weight": self._embedding.slot}
        self._positions: Tensor | None = None
        if spec.num_positions:
            slots["positions.weight"] = WeightSlot((spec.num_positions, spec.width), self._fill_positions)
        self._per_layer_inputs: Callable[[Tensor, Tensor], Tensor] | None = None
        if spec.per_layer_inputs is not None:
            made = PerLayerEmbedding(
                spec.per_layer_inputs, len(spec.layers), spec.width, ops, dtype, device, spec.vocab_size, ranks
            )
            self._per_layer_inputs = made
            slots |= nested(per_layer_inputs=made.slots)
        self._layers = LayerStack(spec, new_norm, ops, dtype, device, ranks)
        slots |= self._layers.slots
        self._fused: FusedLayers | None = None
        self._fused_adapted: FusedLayers | None = None
        self._fused_head: Callable[[Tensor], Tensor] | None = None
        slots |= nested(norm=self._norm.slots)
        if not spec.tied_head:
            slots |= nested(head=self._head.slots)
        self.heads = PooledHeads(spec.classifier, spec.dense, spec.width, ops, dtype, device)
        slots |= self.heads.slots
        self.merged_adapter: str | None = None
        self.replicas: RankGroup | None = None
        self.weights = WeightTable(slots, dtype, device, self._fuse)

    @property
    def cache_groups(self) -> tuple[LayerGroup, ...]:
        """Layer groups, in the order of storages and attention batches."""
        return self.spec.cache_groups

    @property
    def ranks(self) -> RankGroup | None:
        """Ranks that share the model, each with its part of every layer; None for one process."""
        return self._ranks

    @property
    def kernels(self) -> str:
        """Name of the kernels."""
        return self.ops.name

    def _fuse(self) -> None:
        """Ask the backend for fused layers, a fused head and fused experts."""
        if isinstance(self.ops, FusesLayers):
            self._fused = self._layers.fuse(self.ops)
            row_norm = self._norm.row_norm
            self._fused_head = None if row_norm is None else self.ops.fuse_norm(row_norm, self._head.run)
        # 16-bit logits add a sixth of the error of int8 inputs, and make close logits equal.
        is_free = isinstance(self._head.run, RoundsInputs) and self._head.run.rounds_inputs
        self._head_dtype = torch.float32 if is_free else self.dtype
        if isinstance(self.ops, FusesExperts):
            self._layers.fuse_experts(self.ops)

    def _fill_positions(self, tensor: Tensor) -> None:
        self._positions = tensor.clone()

    def fuse_adapted(self) -> None:
        """Ask the backend for fused layers and fused experts with adapters."""
        if isinstance(self.ops, FusesLayers):
            self._fused_adapted = self._layers.fuse(self.ops)
        if isinstance(self.ops, FusesExperts):
            self._layers.fuse_adapted_experts(self.ops)

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        groups: Sequence[AttentionBatch | StateBatch],
        storages: Sequence[PagedKV | PagedStates],
        row_embeddings: tuple[Tensor, Tensor] | None = None,
        output_rows: OutputRows | None = None,
        adapters: tuple[LoraRows, LoraRows | None] | None = None,
    ) -> Tensor:
        """Run the layers over a step's rows; keys, values and states are stored.

        After the mixer of the last cached layer, only output rows are computed.

        Args:
            input_ids: [T] of int64.
            positions: [T] of int64; [3, T] in a step with rows of images, where the model has sections for them.
            groups: the step's part in each cache group.
            storages: one for each cache group.
            row_embeddings: rows, [M] of int64, and embeddings [M, E] that replace the embeddings of their tokens,
                unscaled; or [M, (1 + D) E] with additions to the rows after the first D layers.
            output_rows: rows whose hidden states are returned; None for all rows.
            adapters: rows that have an adapter, among all rows and among the output rows; None for no such row.

        Returns:
            Hidden states before the last norm, [T, E]; [R, E] with `output_rows`.
        """
        if adapters is not None or self.step_adapters.all is not None:
            self.step_adapters.begin(adapters)
        x = self._look_up(input_ids)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        additions = None
        are_causal = not any(isinstance(group, ImageAttentionBatch) for group in groups)
        if row_embeddings is not None:
            rows, embeddings = row_embeddings
            given = embeddings.view(len(rows), -1, self.spec.width)
            x = x.index_copy(0, rows, given[:, 0])
            additions = (rows, given[:, 1:]) if given.shape[1] > 1 else None
        if self._positions is not None:
            x = x + self.ops.embedding(positions, self._positions)
        per_layer = None if self._per_layer_inputs is None else self._per_layer_inputs(input_ids, x)
        rotations = {rope_key: rotate(positions) for rope_key, rotate in self._layers.rotations.items()}
        fused = self._fused if adapters is None else self._fused_adapted
        if output_rows is not None and additions is not None and self._layers.picks_within(additions[1].shape[1]):
            every = self._layers(x, positions, rotations, groups, storages, per_layer, None, additions)
            return every.index_select(0, output_rows.rows)
        if output_rows is None and additions is None and are_causal and fused is not None:
            hidden = fused(x, list(rotations.values()), groups, storages)
            if hidden is not None:
                return hidden
        return self._layers(x, positions, rotations, groups, storages, per_layer, output_rows, additions)

    def normed(self, hidden: Tensor) -> Tensor:
        """Return hidden states [R, E] after the last norm."""
        return self._norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, V], float32, of hidden states [R, E]; only rank 0 calls it."""
        ranks = self._ranks
        product = self._product(hidden) if ranks is None else ranks.head(hidden, self._product, self._widths)
        return self._as_logits(product)

    def likeliest(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the greatest logit [R] of each row of `hidden` [R, E] and its token [R]; ranks search their columns.

        None for one process, which has all columns.
        """
        return None if self._ranks is None else self._ranks.likeliest(hidden, self._own_logits, self._widths)

    def draft_tokens(self, hidden: Tensor) -> Tensor:
        """Return the likeliest token [R] after each row of `hidden` [R, E], the same on every rank; all call it."""
        if self._ranks is not None:
            return self._ranks.agreed_likeliest(self._own_logits(hidden), self._widths)
        tokens = self.logits(hidden).argmax(-1)
        # Processors of different hosts may round differently, and all ranks must continue with the same tokens.
        return tokens if self.replicas is None else self.replicas.of_first(tokens)

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
        """True on all ranks but 0, which samples the tokens."""
        return self._ranks is not None and self._ranks.rank > 0

    def serve_head(self) -> None:
        """Compute this rank's logits of rows that rank 0 sends, until it sends commands."""
        assert self._ranks is not None, "one process has all logits"
        self._ranks.serve_head(self.spec.width, self.dtype, self._product, self._own_logits, self._widths)

    def _product(self, hidden: Tensor) -> Tensor:
        """Return the head's product [R, V] of hidden states [R, E]; with several ranks, this rank's columns."""
        if self._fused_head is not None:
            return self._fused_head(hidden)
        return self._head.run(self._norm(hidden).to(self._head_dtype))
