"""From a plan to tensors: block tables are kept here and updated by the deltas in each plan."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, count
from operator import add
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from quire.execution.step.image_rows import image_positions, joint_rows
from quire.execution.step.pinned import placed
from quire.execution.step.row_layout import RowLayout, layout_kernels
from quire.models.modules.blocks import OutputRows
from quire.models.modules.image_attention import ImageAttentionBatch
from quire.models.specs.spec import StateCacheShape, TokenCacheShape
from quire.ops.interface.ops import AttentionBatch, StateBatch
from quire.platform.prefault import CacheUse
from quire.scheduling.decode_columns import DecodeItems
from quire.scheduling.plan import ScheduledSequence, StepPlan, TableDelta
from quire.sequences.media import Media

_stamps = count(1)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input to a model.

    Args:
        input_ids: [T] of int64, the items' tokens, concatenated.
        positions: [T] of int64; [3, T] with rows of images, see `quire.execution.step.image_rows`.
        groups: one batch per cache group: an `AttentionBatch` or a `StateBatch`.
        row_starts: S + 1 row indices; item `s` owns rows `[row_starts[s], row_starts[s + 1])`.
    """

    input_ids: Tensor
    positions: Tensor
    groups: tuple[AttentionBatch | StateBatch, ...]
    row_starts: list[int]


class BlockTable:
    """One sequence's blocks in one cache group: an array that grows, and is cut or overwritten in place."""

    __slots__ = ("ids", "stamp")

    def __init__(self) -> None:
        self.ids = array("q")
        self.stamp = next(_stamps)

    def change(self, delta: TableDelta) -> None:
        """Set `table[delta.start:]` to the delta's blocks."""
        _, start, block_ids = delta
        ids = self.ids
        assert start <= len(ids), f"a table of {len(ids)} blocks cannot change from {start} on"
        if start < len(ids):
            self.stamp = next(_stamps)
        ids[start:] = array("q", block_ids)


class TokenSource(Protocol):
    """Tokens on the device that the host has not read, for which a step has placeholders (`UNKNOWN`)."""

    def fill(self, input_ids: Tensor, items: Sequence[ScheduledSequence], rows: Sequence[int]) -> None:
        """Replace placeholders by the tokens that they stand for; the host does not wait.

        Args:
            input_ids: int64 [T] on the device, changed.
            items: items of the step, all or some.
            rows: first row of each of them; further entries are not read.
        """


class BatchBuilder:
    """Builds each step's batch, and remembers the block tables between steps.

    Args:
        block_size: N.
        device: device of the batches' tensors, which are built on the CPU.
        cache: cache shape of each group. Table entries of tokens outside the window, or in an earlier chunk, are not
            read and may be the null block. For a group of states only the last entry is read.
        tokens: source of the tokens of placeholders; None for plans without any.
        media: media of the open sequences that have some, kept by the caller.

    Attributes:
        use: use of the cache so far; see `CacheUse`.
        tables: block tables of the open sequences, one for each cache group.
    """

    def __init__(
        self,
        block_size: int,
        device: torch.device | str,
        cache: Sequence[TokenCacheShape | StateCacheShape],
        tokens: TokenSource | None = None,
        media: Mapping[int, tuple[Media, ...]] = MappingProxyType({}),
    ) -> None:
        self._media = media
        self._block_size = block_size
        self._device = torch.device(device)
        self._is_cpu = self._device.type == "cpu"
        self._caches = tuple(cache)
        self._tokens = tokens
        self.tables: dict[int, tuple[BlockTable, ...]] = {}
        self.use = CacheUse(len(self._caches))

    def build(self, plan: StepPlan) -> Batch:
        """Apply a plan, and lay its items out as one batch."""
        self.apply_plan(plan)
        return self.lay_out(plan.items)

    def apply_plan(self, plan: StepPlan) -> None:
        """Drop the tables of finished sequences, and apply the plan's table deltas."""
        for seq_id in plan.finished_ids:
            self.tables.pop(seq_id, None)
        if isinstance(plan.items, DecodeItems):
            for seq_id, deltas in plan.items.changes():
                self._change_tables(seq_id, deltas)
            return
        for item in plan.items:
            if item.new_sequence is not None:
                self.tables[item.seq_id] = tuple(BlockTable() for _ in self._caches)
            if item.table_deltas:
                self._change_tables(item.seq_id, item.table_deltas)

    def lay_out(self, items: Sequence[ScheduledSequence], groups_of: range | None = None) -> Batch:
        """Lay items out as one batch.

        Args:
            items: items of open sequences, whose tables hold slots for all their tokens; without items the batch is
                empty.
            groups_of: indices of the cache groups that the batch is for; None for all.
        """
        batch = self._lay_out(items, groups_of)
        if self._tokens is not None:
            self._tokens.fill(batch.input_ids, items, batch.row_starts)
        return batch

    def _lay_out(self, items: Sequence[ScheduledSequence], groups_of: range | None) -> Batch:
        """Lay items out as `lay_out` does, with their placeholders."""
        items = items.items if isinstance(items, DecodeItems) else items
        counts = [len(item.token_ids) for item in items]
        row_starts = list(accumulate(counts, initial=0))
        input_ids = self._placed(chain.from_iterable([item.token_ids for item in items]))
        starts = [item.start for item in items]
        context_lens = list(map(add, starts, counts))
        # If every item is a decode (one row), plain loops are as fast as the compiled kernels.
        kernels = layout_kernels() if row_starts[-1] > len(items) else None
        layout = None if kernels is None else RowLayout(starts, context_lens, kernels)
        groups: list[AttentionBatch | StateBatch] = []
        for group_idx in range(len(self._caches)) if groups_of is None else groups_of:
            cache = self._caches[group_idx]
            tables = [self.tables[item.seq_id][group_idx] for item in items]
            match cache:
                case TokenCacheShape():
                    groups.append(self._attention(cache, tables, row_starts, starts, context_lens, layout))
                case StateCacheShape():
                    groups.append(self._states(tables, items, row_starts))
        positions: Tensor | array[int]
        positions = layout.positions() if layout else array("q", chain.from_iterable(map(range, starts, context_lens)))
        if self._media:
            indices = positions if isinstance(positions, Tensor) else torch.tensor(positions, dtype=torch.int64)
            positions = image_positions(indices, items, row_starts, self._media)
            if images := joint_rows(items, row_starts, self._media):
                groups = [
                    ImageAttentionBatch.of(group, images) if isinstance(group, AttentionBatch) else group
                    for group in groups
                ]
        return Batch(input_ids, self._placed(positions), tuple(groups), row_starts)

    def lay_out_ends(
        self, items: Sequence[ScheduledSequence], counts: Sequence[int], groups_of: range | None = None
    ) -> OutputRows | None:
        """Lay out the last tokens of items only, as a subset of the rows of the items' batch.

        Args:
            items: items of the batch, as for `lay_out`.
            counts: number of last tokens of each item.
            groups_of: see `lay_out`.

        Returns:
            The rows; None if these are all tokens of the batch.
        """
        rows = end_rows(items, counts)
        if len(rows) == sum(len(item.token_ids) for item in items):
            return None
        ends = [
            item._replace(start=item.start + len(item.token_ids) - count, token_ids=item.token_ids[-count:])
            for item, count in zip(items, counts, strict=True)
            if count
        ]
        batch = self._lay_out(ends, groups_of)  # token ids are not read, so placeholders may stay
        return OutputRows(self._placed(rows), batch.positions, batch.groups)

    def put_drawn(self, input_ids: Tensor, items: Sequence[ScheduledSequence]) -> None:
        """Replace placeholders among the token ids of decodes, int64 [R] on the device."""
        if self._tokens is not None:
            self._tokens.fill(input_ids, items, range(len(items)))

    def _change_tables(self, seq_id: int, deltas: tuple[TableDelta, ...]) -> None:
        tables, highest = self.tables[seq_id], self.use.highest_blocks
        for delta in deltas:
            tables[delta.group_idx].change(delta)
            highest[delta.group_idx] = max((highest[delta.group_idx], *delta.block_ids))

    def _attention(
        self,
        cache: TokenCacheShape,
        tables: list[BlockTable],
        row_starts: list[int],
        starts: list[int],
        context_lens: list[int],
        layout: RowLayout | None,
    ) -> AttentionBatch:
        block_size = self._block_size
        num_blocks = [-(-context_len // block_size) for context_len in context_lens]
        ids = [table.ids for table in tables]
        for table, number in zip(ids, num_blocks, strict=True):
            assert number <= len(table), f"a table of {len(table)} blocks cannot hold {number}"
        slots: Tensor | list[int]
        if layout is not None:
            block_ids, slots = layout.blocks(ids, num_blocks, block_size)
        else:
            spans = zip(ids, starts, context_lens, strict=True)
            slots = [
                table[position // block_size] * block_size + position % block_size
                for table, start, end in spans
                for position in range(start, end)
            ]
            joined = array("q")
            for table, number in zip(ids, num_blocks, strict=True):
                joined += table[:number]
            block_ids = torch.frombuffer(joined, dtype=torch.int64) if joined else torch.empty(0, dtype=torch.int64)
        return AttentionBatch(
            self._placed(slots),
            row_starts,
            context_lens,
            self._placed(block_ids),
            list(accumulate(num_blocks, initial=0)),
            cache.window,
            cache.chunk,
            None if self._is_cpu else block_ids,
        )

    def _states(
        self, tables: list[BlockTable], items: Sequence[ScheduledSequence], row_starts: list[int]
    ) -> StateBatch:
        return StateBatch([table.ids[-1] for table in tables], row_starts, [item.start > 0 for item in items])

    def _placed(self, numbers: Tensor | Iterable[int]) -> Tensor:
        """Return integers as an int64 tensor on the device; the host does not wait. From an `array` it is fastest."""
        if not isinstance(numbers, Tensor):
            values = numbers if isinstance(numbers, array) else array("q", numbers)
            if not values:
                return torch.empty(0, dtype=torch.int64, device=self._device)
            numbers = torch.frombuffer(values, dtype=torch.int64)
        return numbers if self._is_cpu else placed(numbers, self._device)


def end_rows(items: Iterable[ScheduledSequence], counts: Iterable[int]) -> list[int]:
    """Return the rows that the last tokens of items have in their batch, `counts` of each item."""
    ends = accumulate(len(item.token_ids) for item in items)
    return list(chain.from_iterable(range(end - count, end) for end, count in zip(ends, counts, strict=True)))
