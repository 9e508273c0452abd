"""Attention of decodes with work items in static buffers: one grid per number of rows, as CUDA graphs require."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from quire.ops.interface.ops import PagedKV
from quire.ops.interface.static_steps import StaticAttentionBatch, StaticLimits, StaticMemory, StaticTable
from quire.ops.triton.attention.decode_sharing import SharedDecodes, no_sharing
from quire.ops.triton.attention.decode_work import ITEM, SPLIT_ROWS, MostWork
from quire.ops.triton.attention.decode_writer import (
    HEADER,
    SHARED_COUNT,
    DecodeRows,
    DecodeWriter,
    WorkBuffers,
    decode_kernels,
)
from quire.ops.triton.attention.shared_prefixes import SharingRule
from quire.ops.triton.attention.shared_work import SHARED_ITEM, SHARED_ROW, MostShared
from quire.ops.triton.attention.splits import most_splits
from quire.ops.triton.attention.step_attention import PlacedItems, PlacedShared, TritonStepAttention
from quire.ops.triton.attention.step_numbers import step_kernels
from quire.ops.triton.launches import Device
from quire.ops.triton.tiles import Tile

# Maximum number of `attend_shared` programs per KV head, as a multiple of `most_splits`; they loop over the items.
SHARED_PROGRAMS: Final = 4


class PlannedGroup(NamedTuple):
    """The work items for layers with the same number of query heads per KV head.

    Args:
        decodes: cached search of shared prefixes.
        writer: writer of the items.
        most: upper bounds for the largest step.
        buffers: static buffers that hold the items.
    """

    decodes: SharedDecodes
    writer: DecodeWriter
    most: MostWork
    buffers: WorkBuffers


class TritonStaticTokens:
    """Decodes over one cache group; see `StaticTokens`."""

    def __init__(
        self,
        kv: PagedKV,
        window: int | None,
        chunk: int | None,
        memory: StaticMemory,
        limits: StaticLimits,
        device: Device,
    ) -> None:
        self._window, self._chunk, self._memory, self._limits = window, chunk, memory, limits
        self._num_kv_heads, self._block_size = kv.data.shape[3:5]
        self._num_processors = device.num_processors
        self._slots = memory.take(limits.num_rows, torch.int64)
        self.block_ids: StaticTable = memory.take_table(limits.num_blocks + 1, torch.int64)
        self._planned: dict[int, PlannedGroup] = {}
        self._rows: DecodeRows | None = None
        self._kernels = decode_kernels()
        # Positions, first visible tokens and table offsets of rows; compiled code writes them.
        self._row_numbers = torch.zeros(3, limits.num_rows, dtype=torch.int64)
        self._columns: dict[int, list[Tensor]] = {}  # `_row_numbers` cut to a number of rows, by that number
        pointers = self._slots.host.data_ptr(), *(row.data_ptr() for row in self._row_numbers)
        self._lay_options = self._block_size, window or 0, chunk or 0, *pointers

    def batch(self, num_rows: int, shares: bool = False) -> StaticAttentionBatch:
        """Return the batch of a step of `num_rows` rows."""
        return StaticAttentionBatch(
            self._slots.device[:num_rows],
            range(num_rows + 1),
            (1,) * num_rows,
            self.block_ids.device,
            range(num_rows + 1),
            self._window,
            self._chunk,
            source=self,
            shares=shares,
        )

    def share(self, positions: Tensor, block_ids: Tensor, block_starts: Tensor, stamps: Sequence[int]) -> bool:
        """Find shared tokens, for each number of query heads per KV head that layers have."""
        firsts = self._firsts(positions)
        is_shared = [
            planned.decodes.find(positions, firsts, block_ids, block_starts, stamps)
            for planned in self._planned.values()
        ]
        return any(is_shared)

    def write_tokens(
        self, positions: Tensor, block_ids: Tensor, block_starts: Tensor, num_rows: int, shares: bool = False
    ) -> None:
        """Write the slot mapping, block tables and work items."""
        if self._kernels is None:
            self._rows = self._lay_by_torch(positions, block_ids, block_starts, num_rows)
        else:
            num_real, args = positions.numel(), (positions.data_ptr(), block_ids.data_ptr(), block_starts.data_ptr())
            self._kernels.lay(num_real, num_rows, *args, block_ids.numel() - 1, *self._lay_options)
            if num_rows not in self._columns:
                self._columns[num_rows] = list(self._row_numbers[:, :num_rows])
            row_positions, firsts, starts = self._columns[num_rows]
            self._rows = DecodeRows(row_positions, firsts, starts, num_real)
        self.block_ids.write(block_ids)
        for planned in self._planned.values():
            planned.writer.write(self._rows, planned.decodes.sharing if shares else no_sharing())

    def _lay_by_torch(self, positions: Tensor, block_ids: Tensor, block_starts: Tensor, num_rows: int) -> DecodeRows:
        """Write the slot mapping, and return the rows with padding."""
        num_real, size = len(positions), self._block_size
        slots = self._slots.host
        # (block - position // size) * size + position is the block's slot of that position.
        idx = positions // size
        blocks = block_ids.index_select(0, block_starts + idx)
        torch.add(positions, blocks.sub_(idx), alpha=size, out=slots[:num_real])
        padding = num_rows - num_real
        if padding:  # padding rows read the last entry of the tables, the null block
            slots[num_real:num_rows] = 0
            positions = torch.cat((positions, positions.new_zeros(padding)))
            block_starts = torch.cat((block_starts, block_starts.new_full((padding,), len(block_ids) - 1)))
        return DecodeRows(positions, self._firsts(positions), block_starts, num_real)

    def _firsts(self, positions: Tensor) -> Tensor:
        """Return the first token that each row sees."""
        if self._chunk is not None:
            return positions // self._chunk * self._chunk
        if self._window is not None:
            return (positions + (1 - self._window)).clamp_(min=0)
        return torch.zeros_like(positions)

    def launch(self, group: int, num_rows: int, tile: Tile, rule: SharingRule, shares: bool) -> PlacedItems:
        """Return the work items of a launch for steps of `num_rows` rows; their buffers are made at the first call."""
        planned = self._planned.get(group)
        if planned is None:
            shared = self._most_shared(self._limits.num_rows, rule)
            most = self._most(self._limits.num_rows, tile).with_shared(self._limits.num_rows, shared)
            buffers = WorkBuffers(
                self._memory.take(HEADER + ITEM * most.num_items + SPLIT_ROWS * most.num_split, torch.int32),
                self._memory.take_table(SHARED_ITEM * shared.num_items, torch.int32),
                self._memory.take_table(SHARED_ROW * shared.num_rows, torch.int32),
            )
            heads, processors = self._num_kv_heads, self._num_processors
            planned = self._planned[group] = PlannedGroup(
                SharedDecodes(rule, heads, processors, step_kernels()),
                DecodeWriter(tile.tokens, most, self._limits.num_rows, heads, processors, buffers, self._kernels),
                most,
                buffers,
            )
            assert self._rows is not None, "a step comes before its work"
            planned.writer.write(self._rows, no_sharing())
            self._memory.upload()
        numbers, most, placed = planned.buffers.numbers.device, self._most(num_rows, tile), None
        if shares:
            shared = self._most_shared(num_rows, rule)
            most = most.with_shared(num_rows, shared)
            num_programs = min(
                shared.num_items, SHARED_PROGRAMS * most_splits(self._num_kv_heads, self._num_processors)
            )
            items, rows = planned.buffers.shared_items.device, planned.buffers.shared_rows.device
            placed = PlacedShared(rule.tile, items, rows, numbers[SHARED_COUNT:], num_programs)
        num_items, num_places, num_split = most
        split_rows = numbers[HEADER + ITEM * planned.most.num_items :]
        return PlacedItems(tile, numbers[HEADER:], num_items, num_places, split_rows, num_split, numbers, placed)

    def _most(self, num_rows: int, tile: Tile) -> MostWork:
        return MostWork.of(num_rows, tile.tokens, self._num_kv_heads, self._num_processors)

    def _most_shared(self, num_rows: int, rule: SharingRule) -> MostShared:
        return MostShared.of(num_rows, rule.tile_rows, self._num_kv_heads, self._num_processors)


class TritonStaticAttention(TritonStepAttention):
    """Attention of decodes over one cache group: one launch for all rows, and one that combines splits."""

    def __init__(self, batch: StaticAttentionBatch, kv: PagedKV, device: Device) -> None:
        super().__init__(batch, kv, device)
        assert isinstance(batch.source, TritonStaticTokens), "a batch of another backend"
        self._source, self._shares = batch.source, batch.shares

    def _launches(self, group: int, num_rows: int) -> Iterator[PlacedItems]:
        """Yield the single kind of items: decodes."""
        yield self._source.launch(group, num_rows, self.tiles(group)[0], self.sharing_rule(group), self._shares)
