"""Work items of a step as int32 buffers for kernels, planned on the host by compiled code if it is installed.

`plan_work` is the reference implementation of the compiled code, and the fallback.
"""

from __future__ import annotations

from array import array
from functools import cache, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from quire.ops.cpu.native_library import find_library
from quire.ops.cpu.native_step_work import SharingRuleCall, SplitRuleCall, StepCountsCall, StepCutCall, StepWorkKernels
from quire.ops.cpu.native_structures import StepRows
from quire.ops.triton.attention.decode_work import ITEM, SPLIT_ROWS
from quire.ops.triton.attention.shared_prefixes import MAX_RANGES, PARTIAL_PASSES, SharingRule
from quire.ops.triton.attention.shared_work import SHARED_ITEM, SHARED_ROW
from quire.ops.triton.attention.splits import busy_sequences, split_bounds
from quire.ops.triton.attention.work_items import Work, host_block_ids, plan_work
from quire.ops.triton.tiles import Tile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire.ops.interface.ops import AttentionBatch

# Length of the last section: the number of shared items, then zeros, as sections are aligned to 16 bytes.
COUNT: Final = 4
NUMBER_BYTES: Final = 4


class StepCut(NamedTuple):
    """The parameters by which a step is cut into items.

    Args:
        group: number of query heads of a KV head.
        decode, prefill: tiles of sequences with few rows, and of others.
        num_kv_heads: K; each KV head has its own programs.
        num_processors: number of processors of the GPU.
        rule: conditions under which shared tokens are read once; None for never.
    """

    group: int
    decode: Tile
    prefill: Tile
    num_kv_heads: int
    num_processors: int
    rule: SharingRule | None


class StepNumbers(NamedTuple):
    """The items of a step; see `Work`.

    Args:
        num_few, num_parts, num_many, num_split: number of items of each kind, and of split rows.
        num_places: number of partial results.
        num_shared_items, num_shared_rows: number of items of shared tokens, and of their rows.
        numbers: int32 on the host, concatenated: items of the three kinds, split rows, shared items, rows of shared
            items, and the number of shared items.
    """

    num_few: int
    num_parts: int
    num_many: int
    num_split: int
    num_places: int
    num_shared_items: int
    num_shared_rows: int
    numbers: Tensor

    @classmethod
    def of(cls, work: Work) -> StepNumbers:
        """Return planned work as int32 fields."""
        shared_items, shared_rows = work.shared
        sections = (
            _padded(work.few, ITEM),
            _padded(work.parts, ITEM),
            _padded(work.many, ITEM),
            _padded(work.split_rows, SPLIT_ROWS),
            _padded(shared_items, SHARED_ITEM),
            _padded(shared_rows, SHARED_ROW),
            [len(shared_items), *(0,) * (COUNT - 1)],
        )
        return cls(
            len(work.few),
            len(work.parts),
            len(work.many),
            len(work.split_rows),
            work.num_places,
            len(shared_items),
            len(shared_rows),
            torch.tensor(array("i", chain.from_iterable(sections)), dtype=torch.int32),
        )

    def sections(self, numbers: Tensor) -> tuple[Tensor, ...]:
        """Split `numbers`, or their copy on a GPU, into the sections."""
        lengths = [
            *(ITEM * count for count in (self.num_few, self.num_parts, self.num_many)),
            SPLIT_ROWS * self.num_split,
            SHARED_ITEM * self.num_shared_items,
            SHARED_ROW * self.num_shared_rows,
            COUNT,
        ]
        return torch.split(numbers, lengths)


@cache
def step_kernels() -> StepWorkKernels | None:
    """Return the compiled code; None if Quire was installed without it."""
    library = find_library()
    return None if isinstance(library, str) else library.step_work


@lru_cache(maxsize=64)
def sharing_call(rule: SharingRule, num_kv_heads: int, num_processors: int) -> SharingRuleCall:
    """Return a rule as an argument of the compiled code."""
    return SharingRuleCall(
        *(rule.tile_rows, rule.unit, rule.block_size, rule.token_bytes, rule.partial_bytes * PARTIAL_PASSES),
        *(rule.least_tokens, MAX_RANGES, rule.least_bytes),
        _splits(rule.tile, 0, num_kv_heads, num_processors),
    )


def number_work(batch: AttentionBatch, cut: StepCut, kernels: StepWorkKernels | None) -> StepNumbers:
    """Cut a step into items."""
    if kernels is None:
        return StepNumbers.of(plan_work(batch, *cut))
    starts, lens, tables = (array("q", values) for values in (batch.row_starts, batch.context_lens, batch.block_starts))
    block_ids = host_block_ids(batch)
    rows = StepRows(
        len(lens), *(values.buffer_info()[0] for values in (starts, lens, tables)), block_ids.data_ptr(), None
    )
    how = _cut_call(cut, batch.window or 0, batch.chunk or 0)
    rule = None if cut.rule is None else sharing_call(cut.rule, cut.num_kv_heads, cut.num_processors)
    counts = StepCountsCall()
    # Initial guess of the size: two items per sequence, more than most steps have.
    needed = 2 * ITEM * len(lens) + 1024
    numbers = torch.empty(0, dtype=torch.int32)
    while needed > numbers.numel():
        numbers = torch.frombuffer(bytearray(needed * NUMBER_BYTES), dtype=torch.int32)
        needed = kernels.plan(rows, how, rule, numbers.data_ptr(), numbers.numel(), counts)
    return StepNumbers(
        counts.num_few,
        counts.num_parts,
        counts.num_many,
        counts.num_split,
        counts.num_places,
        counts.num_shared_items,
        counts.num_shared_rows,
        numbers[:needed],
    )


@lru_cache(maxsize=64)
def _cut_call(cut: StepCut, window: int, chunk: int) -> StepCutCall:
    busy = busy_sequences(cut.num_kv_heads, cut.num_processors)
    return StepCutCall(
        *(cut.group, cut.decode.rows, cut.prefill.rows // cut.group, window, chunk, busy),
        *(_splits(cut.decode, num_sequences, cut.num_kv_heads, cut.num_processors) for num_sequences in (0, busy)),
    )


def _splits(tile: Tile, num_sequences: int, num_kv_heads: int, num_processors: int) -> SplitRuleCall:
    return SplitRuleCall(tile.tokens, num_kv_heads, *split_bounds(num_sequences, num_kv_heads, num_processors))


def _padded(entries: Iterable[tuple[int, ...]], width: int) -> list[int]:
    """Return the fields of entries, concatenated, each entry padded with zeros to `width` fields."""
    return [number for entry in entries for number in (*entry, *(0,) * (width - len(entry)))]
