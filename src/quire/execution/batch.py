"""From a plan to tensors: block tables are kept here and changed by the plan's differences only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from quire.models.spec import KeptState, KeptTokens
from quire.ops.interface import AttentionBatch, StateBatch
from quire.scheduling.plan import PlanItem, StepPlan, TableDelta


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input to a model.

    Args:
        input_ids: [T] of int64, the items' tokens one behind the other.
        positions: [T] of int64.
        groups: one for each cache group, as what it keeps asks for.
        row_starts: S + 1 numbers; item `s` owns rows `[row_starts[s], row_starts[s + 1])`.
    """

    input_ids: Tensor
    positions: Tensor
    groups: tuple[AttentionBatch | StateBatch, ...]
    row_starts: list[int]


class BlockTable:
    """One sequence's blocks in one cache group: an array that grows by doubling and is cut or overwritten in place."""

    __slots__ = ("_ids", "_length")

    def __init__(self) -> None:
        self._ids = torch.empty(16, dtype=torch.int64)
        self._length = 0

    def change(self, delta: TableDelta) -> None:
        """Set `table[delta.start:]` to the delta's blocks."""
        length = delta.start + len(delta.block_ids)
        assert delta.start <= self._length, f"a table of {self._length} blocks cannot change from {delta.start} on"
        if length > len(self._ids):
            grown = torch.empty(max(length, 2 * len(self._ids)), dtype=torch.int64)
            grown[: delta.start] = self._ids[: delta.start]
            self._ids = grown
        if len(delta.block_ids) == 1:
            self._ids[delta.start] = delta.block_ids[0]
        else:
            self._ids[delta.start : length] = torch.tensor(delta.block_ids, dtype=torch.int64)
        self._length = length

    def first(self, num_blocks: int) -> Tensor:
        """Return a view of the first `num_blocks` ids."""
        assert num_blocks <= self._length, f"a table of {self._length} blocks cannot hold {num_blocks}"
        return self._ids[:num_blocks]


class BatchBuilder:
    """Builds each step's batch, and remembers the block tables between steps.

    Args:
        block_size: N.
        device: where the tensors go; they are made on the CPU.
        kept: what the layers of each cache group keep. What no row sees any more, behind a window or in an earlier
            chunk, is not read, so the table may name any block there: the null block, say. Of a group of states only
            one entry is read, that of the block in which the sequence's tokens end.
    """

    def __init__(self, block_size: int, device: torch.device | str, kept: Sequence[KeptTokens | KeptState]) -> None:
        self._block_size = block_size
        self._device = torch.device(device)
        self._kept = tuple(kept)
        self._tables: dict[int, tuple[BlockTable, ...]] = {}

    def build(self, plan: StepPlan) -> Batch:
        """Forget what the plan closes, apply its table changes, and lay its items out as one batch.

        Args:
            plan: of the step; without items the batch is empty.
        """
        for seq_id in plan.closed:
            self._tables.pop(seq_id, None)
        for item in plan.items:
            self._change_tables(item)
        items = plan.items
        counts = [len(item.token_ids) for item in items]
        row_starts = list(accumulate(counts, initial=0))
        token_ids = chain.from_iterable(item.token_ids for item in items)
        # To make a tensor of few numbers takes longer than to cut one.
        numbers = torch.tensor([*token_ids, *(item.start for item in items)], dtype=torch.int64)
        input_ids, starts = numbers[: row_starts[-1]], numbers[row_starts[-1] :]
        context_lens = [item.start + count for item, count in zip(items, counts, strict=True)]
        if row_starts[-1] == len(items):  # one row each: nothing to spread
            owners, positions = None, starts
        else:
            owners = torch.repeat_interleave(torch.tensor(counts))
            firsts = torch.tensor(row_starts[:-1])
            positions = torch.arange(row_starts[-1]) + (starts - firsts)[owners]
        groups: list[AttentionBatch | StateBatch] = []
        for group_idx, kept in enumerate(self._kept):
            tables = [self._tables[item.seq_id][group_idx] for item in items]
            match kept:
                case KeptTokens():
                    groups.append(self._attention(kept, tables, row_starts, context_lens, positions, owners))
                case KeptState():
                    groups.append(self._states(tables, items, row_starts, context_lens))
        return Batch(self._placed(input_ids), self._placed(positions), tuple(groups), row_starts)

    def _change_tables(self, item: PlanItem) -> None:
        if item.opening is not None:
            self._tables[item.seq_id] = tuple(BlockTable() for _ in self._kept)
        if item.table_deltas:
            tables = self._tables[item.seq_id]
            for delta in item.table_deltas:
                tables[delta.group_idx].change(delta)

    def _attention(
        self,
        kept: KeptTokens,
        tables: list[BlockTable],
        row_starts: list[int],
        context_lens: list[int],
        positions: Tensor,
        owners: Tensor | None,
    ) -> AttentionBatch:
        block_size = self._block_size
        num_blocks = [-(-context_len // block_size) for context_len in context_lens]
        block_starts = list(accumulate(num_blocks, initial=0))
        parts = [table.first(n) for table, n in zip(tables, num_blocks, strict=True)]
        block_ids = torch.cat(parts) if parts else positions
        table_starts = torch.tensor(block_starts[:-1], dtype=torch.int64)
        if owners is not None:
            table_starts = table_starts[owners]
        blocks = block_ids[table_starts + positions // block_size]
        slot_mapping = blocks * block_size + positions % block_size
        return AttentionBatch(
            self._placed(slot_mapping),
            row_starts,
            context_lens,
            self._placed(block_ids),
            block_starts,
            kept.window,
            kept.chunk,
        )

    def _states(
        self, tables: list[BlockTable], items: tuple[PlanItem, ...], row_starts: list[int], context_lens: list[int]
    ) -> StateBatch:
        ends = [-(-context_len // self._block_size) for context_len in context_lens]
        block_ids = [int(table.first(end)[-1]) for table, end in zip(tables, ends, strict=True)]
        return StateBatch(block_ids, row_starts, [item.start > 0 for item in items])

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)
