"""Positions, slot mapping and concatenated block tables of a step's rows, by compiled code.

The loops over rows in `BatchBuilder` are the reference implementation, and used without it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.cpu.native_library import find_library
from quire.ops.cpu.native_row_layout import RowLayoutKernels


class LaidBlocks(NamedTuple):
    """The block tables and slot mapping of a step in one cache group.

    Args:
        block_ids: int64 on the host, concatenated block tables of the sequences, each up to the sequence's end.
        slots: int64 [T] on the host, slot of each row.
    """

    block_ids: Tensor
    slots: Tensor


class RowLayout:
    """The rows `[starts[s], ends[s])` of sequences."""

    def __init__(self, starts: Sequence[int], ends: Sequence[int], kernels: RowLayoutKernels) -> None:
        self._starts, self._ends, self._kernels = array("q", starts), array("q", ends), kernels
        self._num_rows = sum(ends) - sum(starts)

    def positions(self) -> Tensor:
        """Return the position of each row, int64 [T] on the host."""
        positions = _zeros(self._num_rows)
        self._kernels.positions(len(self._starts), *map(_address, (self._starts, self._ends)), positions.data_ptr())
        return positions

    def blocks(self, tables: Sequence[array[int]], num_blocks: Sequence[int], block_size: int) -> LaidBlocks:
        """Return the blocks and slots of a cache group."""
        block_ids, slots = _zeros(sum(num_blocks)), _zeros(self._num_rows)
        addresses = array("Q", map(_address, tables))
        rows = map(_address, (self._starts, self._ends, addresses))
        self._kernels.slots(len(tables), *rows, block_size, block_ids.data_ptr(), slots.data_ptr())
        return LaidBlocks(block_ids, slots)


@cache
def layout_kernels() -> RowLayoutKernels | None:
    """Return the compiled code; None if Quire was installed without any."""
    library = find_library()
    return None if isinstance(library, str) else library.row_layout


def _zeros(count: int) -> Tensor:
    """Return int64 zeros in memory of a `bytearray`, which is not counted as device memory."""
    return torch.frombuffer(bytearray(8 * count), dtype=torch.int64) if count else torch.empty(0, dtype=torch.int64)


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
