"""The adapters of a linear layer by Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from quire.ops.interface.lora import ANY_SLOT, LoraRows, LoraWeight
from quire.ops.interface.static_steps import StaticLimits, StaticMemory, vector
from quire.ops.interface.weight_memory import WeightMemory
from quire.ops.triton.kernels import adapters as kernels
from quire.ops.triton.launches import Device
from quire.ops.triton.tiles import power_of_2

# Rows of a tile: for decodes, which usually have different adapters, and for prompts.
FEW_ROWS: Final = 16
MANY_ROWS: Final = 64
# Tile sizes: ranks, inputs, and columns of the output.
MOST_RANKS: Final = 64
INPUTS: Final = 128
COLUMNS: Final = 64
# Inputs of a split (split-K) of the shrink kernel. It is constant, so that sums do not depend on the batch.
SPLIT_WIDTH: Final = 1024
# Initial length of a table, whose first entry means no adapter. Captured steps keep reading the table of this length.
NUM_ENTRIES: Final = 1024
# Spare tiles of a captured step beyond full ones: each adapter may have one tile that is not full.
STATIC_ADAPTERS: Final = 64


class PackedAdapter(NamedTuple):
    """The matrices of an adapter in one layer.

    Args:
        a: [R, in].
        b: [out, R], R padded to a multiple of 16; block diagonal: zero for a column and a rank of different parts.
    """

    a: Tensor
    b: Tensor


class AdapterTiles(NamedTuple):
    """Rows of a step that have an adapter, as tiles for the kernels; int32, on the device.

    Args:
        entries: index of each tile's adapter in the tables of layers; 0 for a tile without rows.
        firsts: index of each tile's first row in `rows`.
        ends: index after its last row.
        rows: rows of the step, grouped by adapter.
        num_rows: number of rows of a tile.
    """

    entries: Tensor
    firsts: Tensor
    ends: Tensor
    rows: Tensor
    num_rows: int


def cut(rows: LoraRows, size: int) -> list[tuple[int, int, int]]:
    """Cut the rows of each adapter into tiles of `size` rows; return entry, first row and end of each tile."""
    groups = zip(rows.slots, pairwise(rows.starts), strict=True)
    return [
        (slot + 1, first, min(first + size, end)) for slot, (start, end) in groups for first in range(start, end, size)
    ]


def place(rows: LoraRows, device: Device) -> AdapterTiles:
    """Return the tiles of a step: one copy to the device."""
    longest = max(end - start for start, end in pairwise(rows.starts))
    size = FEW_ROWS if longest <= FEW_ROWS else MANY_ROWS
    entries, firsts, ends, placed = device.sections(*zip(*cut(rows, size), strict=True), rows.rows)
    return AdapterTiles(entries, firsts, ends, placed, size)


class TritonLoraLayer:
    """The adapters of one linear layer: two launches for the rows of all adapters."""

    def __init__(self, num_columns: int, device: Device, max_rank: int | None = None) -> None:
        self._num_columns, self._device, self._max_rank = num_columns, device, max_rank
        self._adapters: dict[int, PackedAdapter] = {}
        self._table = torch.zeros(NUM_ENTRIES, kernels.ENTRY.value, dtype=torch.int64, device=device.torch_device)
        # Captured steps keep reading this table after it was replaced by a larger one.
        self._captured_table = self._table

    def pack(self, weight: LoraWeight, memory: WeightMemory) -> PackedAdapter:  # noqa: ARG002 (of a CPU's layouts)
        """Join the B matrices of all parts into one; ranks of other parts are zeros."""
        a = weight.a.contiguous()
        padded = kernels.PADDED.value
        b = a.new_zeros(self._num_columns, -(-len(a) // padded) * padded)
        for part, first_rank, first_column in weight.parts:
            num_columns, rank = part.shape
            b[first_column : first_column + num_columns, first_rank : first_rank + rank] = part
        return PackedAdapter(a, b)

    def put(self, slot: int, packed: Any | None) -> None:
        """Set the adapter of a slot."""
        if packed is None and slot not in self._adapters:
            return
        idx = slot + 1
        if idx >= len(self._table):
            grown = self._table.new_zeros(power_of_2(idx + 1), self._table.shape[1])
            grown[: len(self._table)] = self._table
            self._table = grown
        entry = 0, 0, 0
        if packed is None:
            del self._adapters[slot]
        else:
            self._adapters[slot] = packed
            entry = packed.a.data_ptr(), packed.b.data_ptr(), len(packed.a)
        self._table[idx] = torch.tensor(entry)
        if idx < NUM_ENTRIES and self._captured_table is not self._table:
            self._captured_table[idx] = self._table[idx]

    def has(self, slots: Sequence[int]) -> bool:
        """Return whether the adapter of any of the slots has a part in the layer."""
        return ANY_SLOT in slots or not self._adapters.keys().isdisjoint(slots)

    def __call__(self, x: Tensor, rows: LoraRows, residual: Tensor | None) -> Tensor:
        """Multiply by the matrices A and B of each row's adapter, and add the residual."""
        num_columns, width = self._num_columns, x.shape[1]
        output = x.new_zeros(len(x), num_columns) if residual is None else residual.clone()
        max_rank, table = self._max_rank, self._captured_table
        if rows.slots[0] != ANY_SLOT:
            table = self._table
            max_rank = max((len(self._adapters[slot].a) for slot in rows.slots if slot in self._adapters), default=0)
        assert max_rank is not None, "a layer whose adapters are not captured"
        if max_rank == 0:
            return output
        if rows.placed is None:
            rows.placed = place(rows, self._device)
        tiles = rows.placed
        x = x if x.stride(1) == 1 else x.contiguous()
        num_splits, num_tiles = -(-width // SPLIT_WIDTH), tiles.entries.numel()
        parts = torch.empty(num_splits, tiles.rows.numel(), max_rank, dtype=torch.float32, device=x.device)
        shape = {"ROWS": tiles.num_rows, "RANKS": min(MOST_RANKS, power_of_2(max_rank, 16))}
        of_step = table, tiles.entries, tiles.firsts, tiles.ends, tiles.rows
        kernels.lora_shrink[num_tiles, num_splits](
            parts, x, *of_step, width, SPLIT_WIDTH, x.stride(0), parts.stride(0), max_rank, **shape, INPUTS=INPUTS
        )
        kernels.lora_expand[num_tiles, -(-num_columns // COLUMNS)](
            output, parts, *of_step, num_columns, parts.stride(0), max_rank, SPLITS=num_splits, **shape, COLUMNS=COLUMNS
        )
        return output


class TritonStaticAdapters:
    """Adapters of decodes, whose rows are in static buffers; see `StaticAdapters`."""

    def __init__(self, memory: StaticMemory, limits: StaticLimits) -> None:
        most = num_static_tiles(limits.num_rows)
        self._tiles = [memory.take(most, torch.int32) for _ in range(3)]
        self._rows = memory.take(limits.num_rows, torch.int32)

    def rows(self, num_rows: int) -> LoraRows:
        """Return adapter rows on the static buffers."""
        rows = LoraRows(num_rows, {ANY_SLOT: []})
        entries, firsts, ends = (numbers.device[: num_static_tiles(num_rows)] for numbers in self._tiles)
        rows.placed = AdapterTiles(entries, firsts, ends, self._rows.device[:num_rows], FEW_ROWS)
        return rows

    def takes(self, rows: LoraRows) -> bool:
        """Say whether there are tiles for all rows, and entries of the first table for all adapters."""
        num_tiles = sum(-(-(end - start) // FEW_ROWS) for start, end in pairwise(rows.starts))
        return num_tiles <= num_static_tiles(rows.num_rows) and max(rows.slots) + 1 < NUM_ENTRIES

    def write_adapters(self, rows: LoraRows | None, num_rows: int) -> None:
        """Write tiles, and padding tiles without rows after them."""
        tiles = [] if rows is None else cut(rows, FEW_ROWS)
        tiles += [(0, 0, 0)] * (num_static_tiles(num_rows) - len(tiles))
        for numbers, values in zip(self._tiles, zip(*tiles, strict=True), strict=True):
            numbers.host[: len(tiles)] = vector(values)
        if rows is not None:
            self._rows.host[: len(rows.rows)] = vector(rows.rows)


def num_static_tiles(num_rows: int) -> int:
    """Return the number of tiles of a captured step of `num_rows` rows."""
    return min(num_rows, STATIC_ADAPTERS + num_rows // FEW_ROWS)
