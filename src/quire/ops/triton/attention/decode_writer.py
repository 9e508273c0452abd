"""Writes the work items of captured decodes to static buffers, by compiled code if it is installed.

`plan_decodes` and `DecodeSharing.work` are the reference implementation of the compiled code, and the fallback.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from quire.ops.cpu.native_decode_work import DecodeRowsCall, DecodeSharingCall, DecodeWorkCall, DecodeWorkKernels
from quire.ops.cpu.native_library import find_library
from quire.ops.cpu.native_step_work import SplitRuleCall
from quire.ops.interface.static_steps import StaticNumbers, StaticTable
from quire.ops.triton.attention.decode_sharing import DecodeSharing, no_sharing
from quire.ops.triton.attention.decode_work import ITEM, SPLIT_ROWS, MostWork, plan_decodes
from quire.ops.triton.attention.shared_work import SHARED_ITEM, SHARED_ROW
from quire.ops.triton.attention.splits import split_bounds, split_length

# Length of the header before the items: the numbers of items and of split rows, two zeros, then, aligned to `ALIGNMENT`
# bytes, the number of items of shared tokens.
HEADER: Final = 8
SHARED_COUNT: Final = 4


class DecodeRows(NamedTuple):
    """The rows of a step of decodes, on the host.

    Args:
        positions: int64 [n], position of each row in its sequence.
        firsts: int64 [n], first token that each row sees.
        block_starts: int64 [n], index of each row's first block in the block tables.
        num_real: number of rows before the padding.
    """

    positions: Tensor
    firsts: Tensor
    block_starts: Tensor
    num_real: int


class WorkBuffers(NamedTuple):
    """Static buffers for the work items of decodes.

    Args:
        numbers: int32: a header, then items, then split rows.
        shared_items, shared_rows: int32, items of shared tokens, and their rows.
    """

    numbers: StaticNumbers
    shared_items: StaticTable
    shared_rows: StaticTable


@cache
def decode_kernels() -> DecodeWorkKernels | None:
    """Return the compiled code; None if Quire was installed without it."""
    library = find_library()
    return None if isinstance(library, str) else library.decode_work


class DecodeWriter:
    """Writes the work items for layers with the same number of query heads per KV head."""

    def __init__(
        self,
        tile_tokens: int,
        most: MostWork,
        num_rows: int,
        num_kv_heads: int,
        num_processors: int,
        buffers: WorkBuffers,
        kernels: DecodeWorkKernels | None,
    ) -> None:
        self._tile_tokens, self._most, self._buffers, self._kernels = tile_tokens, most, buffers, kernels
        self._num_kv_heads, self._num_processors = num_kv_heads, num_processors
        self._scratch = torch.zeros(3, num_rows, dtype=torch.int64)
        numbers, *tables = buffers
        self._call = DecodeWorkCall(
            SplitRuleCall(tile_tokens, num_kv_heads, 0, 0), most.num_items, most.num_split,
            *(len(table) // width for table, width in zip(tables, (SHARED_ITEM, SHARED_ROW), strict=True)),
            numbers.host.data_ptr(), *(table.host.data_ptr() for table in tables),
            *(row.data_ptr() for row in self._scratch),
        )  # fmt: skip
        self._sharing = no_sharing()
        self._sharing_call = _sharing_call(self._sharing)

    def write(self, rows: DecodeRows, sharing: DecodeSharing) -> None:
        """Write the work items of a step, given its shared tokens."""
        kernels, call = self._kernels, self._call
        if kernels is None:
            return self._write_by_torch(rows, sharing)
        if sharing is not self._sharing:
            self._sharing, self._sharing_call = sharing, _sharing_call(sharing)
        splits = call.splits
        splits.num_programs, splits.min_split = split_bounds(rows.num_real, self._num_kv_heads, self._num_processors)
        positions, firsts, starts, num_real = rows
        pointers = positions.data_ptr(), firsts.data_ptr(), starts.data_ptr()
        rows_call = DecodeRowsCall(num_real, positions.numel(), *pointers)
        has_room = kernels.write(ctypes.byref(rows_call), ctypes.byref(self._sharing_call), ctypes.byref(call))
        assert has_room, f"there is more work than room for {self._most}"
        for table, entries in zip(self._buffers[1:], (sharing.items, sharing.item_members), strict=True):
            table.use(entries.numel())
        return None

    def _write_by_torch(self, rows: DecodeRows, sharing: DecodeSharing) -> None:
        most, firsts, num_shared = self._most, rows.firsts, None
        if len(sharing.rows):
            firsts = firsts.index_copy(0, sharing.rows, sharing.ends)
            num_shared = torch.zeros_like(firsts).index_copy_(0, sharing.rows, sharing.num_parts)
        num_tokens = int((rows.positions + 1 - firsts)[: rows.num_real].sum())
        cut = self._num_kv_heads, self._num_processors, self._tile_tokens
        length = split_length(num_tokens, *cut, rows.num_real)
        work = plan_decodes(
            rows.positions, firsts, rows.block_starts, rows.num_real, self._tile_tokens, length, num_shared
        )
        shared_items, shared_rows = sharing.work(rows.block_starts, work.places)
        num_items, num_split = len(work.items), len(work.split_rows)
        assert num_items <= most.num_items, f"{num_items} items, and there is room for {most.num_items}"
        assert num_split <= most.num_split, f"{num_split} split rows, and there is room for {most.num_split}"
        numbers = self._buffers.numbers.host
        numbers[0], numbers[1], numbers[SHARED_COUNT] = num_items, num_split, len(shared_items)
        numbers[HEADER : HEADER + ITEM * num_items].view(-1, ITEM).copy_(work.items)
        start = HEADER + ITEM * most.num_items
        numbers[start : start + SPLIT_ROWS * num_split].view(-1, SPLIT_ROWS).copy_(work.split_rows)
        for table, entries in zip(self._buffers[1:], (shared_items, shared_rows), strict=True):
            assert entries.numel() <= len(table), f"{entries.numel()} numbers, and there is room for {len(table)}"
            table.write(entries.view(-1))


def _sharing_call(sharing: DecodeSharing) -> DecodeSharingCall:
    """Return the compiled code's argument for shared tokens; it points into `sharing`, which must outlive it."""
    rows, ends, num_parts, items, item_rows, members, member_rows = sharing
    return DecodeSharingCall(
        len(rows), *(tensor.data_ptr() for tensor in (rows, ends, num_parts)),
        len(items), items.data_ptr(), item_rows.data_ptr(),
        len(members), members.data_ptr(), member_rows.data_ptr(),
    )  # fmt: skip
