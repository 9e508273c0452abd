"""The decoder of a stage: hidden states come from the previous stage, and go to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.distributed.pipeline import MAX_MESSAGE_BYTES, PipelineGroup
from quire.errors import ConfigError
from quire.models.modules.blocks import OutputRows
from quire.models.modules.decoder import Decoder
from quire.models.modules.weight_slots import WeightTable
from quire.models.specs.sharding import Split, shard_spec, share_of, splits_of
from quire.models.specs.spec import ModelSpec, WeightMap
from quire.models.specs.stage_spec import Stage, StageSpec, divide, stage_spec, stage_weights
from quire.ops.interface.lora import LoraRows
from quire.ops.interface.ops import AttentionBatch, Ops, PagedKV, PagedStates, StateBatch


class StagePart(NamedTuple):
    """A rank's part of a model in stages.

    Args:
        stage: its stage.
        spec: specification of the stage's layers, or of this rank's part if others share the stage.
        weight_map: see `stage_weights`.
        splits: parts of weights that are read, by names in the stage; other weights are read whole.
    """

    stage: Stage
    spec: StageSpec
    weight_map: WeightMap
    splits: dict[str, Split]


def part_of(spec: ModelSpec, weight_map: WeightMap, group: PipelineGroup) -> StagePart:
    """Return this rank's part of a model."""
    stages, share = divide(spec, group.grid.num_stages), share_of(group.tensor)
    stage, shares = stages[group.stage], None if group.tensor is None else splits_of(spec, share)
    own_spec = stage_spec(shard_spec(spec, share), stages, stage.idx)
    return StagePart(stage, own_spec, *stage_weights(spec, stage, weight_map, shares))


class StageDecoder(Decoder):
    """The layers of a stage over paged memory.

    ```
     first stage     tokens -> embedding -> layers -- hidden [T, E] -->
     between                              -- [T, E] --> layers -- [T, E] -->
     last stage                           -- [T, E] --> layers -> rows that are sampled -> norm, head
    ```

    With per-layer inputs, the embeddings [T, E] are sent with the hidden states: each stage computes its inputs.
    Tensor parallel ranks that share a stage have a part of each of its layers, and all have the hidden states.

    Args:
        part: part of the model that this rank has.
        group: ranks of the stages.
    """

    def __init__(
        self, part: StagePart, *, ops: Ops, dtype: torch.dtype, device: torch.device, group: PipelineGroup
    ) -> None:
        stage, spec = part.stage, part.spec
        super().__init__(spec, ops=ops, dtype=dtype, device=device, ranks=group.tensor)
        self._stage, self._group = stage, group
        self._embeddings: Tensor | None = None
        self._num_sent, self._make_inputs = 1, self._per_layer_inputs
        if not stage.is_first:
            self._look_up = self._receive
            self._embedding_scale = 1.0  # received states are scaled already
        if self._make_inputs is not None:
            self._num_sent, self._per_layer_inputs = 2, self._make_own_inputs
        if not stage.is_last:
            self._head.run = no_head
        slots = {name: slot for name, slot in self.weights.slots.items() if stage.has(name, is_tied=spec.tied_head)}
        self.weights = WeightTable(slots, dtype, device, self._fuse)

    def _receive(self, input_ids: Tensor) -> Tensor:
        """Return the hidden states [T, E] of tokens [T] from the previous stage."""
        received = self._group.receive((self._num_sent, len(input_ids), self.spec.width), self.dtype)
        if self._num_sent > 1:
            self._embeddings = received[1]
        return received[0]

    def _make_own_inputs(self, input_ids: Tensor, x: Tensor) -> Tensor:
        """Return the per-layer inputs of this stage, [T, layers, P]; see `PerLayerEmbedding`."""
        if self._stage.is_first:
            self._embeddings = x
        assert self._embeddings is not None, "embeddings come with hidden states"
        assert self._make_inputs is not None
        return self._make_inputs(input_ids, self._embeddings)

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
        """Run the layers of this stage; see `Decoder`. All stages but the last compute and send all rows."""
        if not self._stage.is_first:  # the first one has put them into the hidden states
            row_embeddings = None
        rows = output_rows if self._stage.is_last else None
        if adapters is not None and rows is None:
            adapters = adapters[0], None
        x = super().__call__(input_ids, positions, groups, storages, row_embeddings, rows, adapters)
        if not self._stage.is_last:
            parts = [x] if self._embeddings is None else [x, self._embeddings]
            self._group.send(torch.stack(parts))
        self._embeddings = None
        return x

    def check_step(self, max_num_batched_tokens: int) -> None:
        """Check that the hidden states of every step can be sent.

        Raises:
            ConfigError: the hidden states of `max_num_batched_tokens` tokens are too large.
        """
        limit = MAX_MESSAGE_BYTES // (self._num_sent * self.spec.width * self.dtype.itemsize)
        if max_num_batched_tokens > limit:
            raise ConfigError(
                f"max_num_batched_tokens must be at most {limit} with pipeline_parallel_size above 1, got "
                f"{max_num_batched_tokens}: the hidden states of a step are sent as one message",
                field="max_num_batched_tokens",
            )

    @property
    def is_follower(self) -> bool:
        """True on all ranks but 0, which samples the tokens."""
        return not self._stage.is_last or super().is_follower

    def serve_head(self) -> None:
        """See `Decoder`; only the last stage has a head."""
        if self._stage.is_last:
            super().serve_head()

    def _fuse(self) -> None:
        super()._fuse()
        # A tied matrix has a layout for look-ups and one for the head; of two tensors, a stage needs only one.
        if not self._stage.is_first:
            vars(self._embedding).pop("look_up", None)
        if not self._stage.is_last:
            self._head.run, self._fused_head = no_head, None


def no_head(x: Tensor, residual: Tensor | None = None) -> Tensor:
    """Replace the output head on stages without one."""
    raise AssertionError("another stage has the output head", x.shape, residual)
