"""The work of captured decodes in static buffers: from step to step, only what changed is written.

A step later each context is a token longer. While each row's own tokens are in as many parts as before, and the same
tokens are shared, all items are at the same places, and so are the split rows and the rows of shared tokens:

```
 item          | row | 1 | position | table | first | end | place of the partial result | 0 |
 shared item   | first row | rows | table | first | end | part | 0 | 0 |
                written in each step: position, table, first and end; tables of shared items
```

`plan_decodes` and `DecodeSharing.work` are the slow twins.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from quire.ops.static_steps import StaticNumbers, StaticTable
from quire.ops.triton.decode_sharing import DecodeSharing
from quire.ops.triton.decode_work import ITEM, SPLIT_ROWS, MostWork, num_parts, parts_of, plan_decodes
from quire.ops.triton.shared_work import SHARED_ITEM
from quire.ops.triton.splits import split_length

# Numbers in front of the items: how many items and split rows there are, and behind two zeros, at a multiple of
# `ALIGNMENT` bytes, how many items of shared tokens.
HEADER: Final = 8
SHARED_COUNT: Final = 4
# Where an item has its position, table, first token and end; where a shared item has its table.
POSITION, TABLE, FIRST, END = range(2, 6)
SHARED_TABLE: Final = 2


class DecodeRows(NamedTuple):
    """The rows of a step of decodes, on the host.

    Args:
        positions: int64 [n], position of each row in its sequence.
        firsts: int64 [n], first token that each row sees.
        block_starts: int64 [n], index of each row's first block in the block tables.
        num_real: number of rows that are no padding, from the first on.
    """

    positions: Tensor
    firsts: Tensor
    block_starts: Tensor
    num_real: int


class WorkBuffers(NamedTuple):
    """Where the work of decodes is written.

    Args:
        numbers: int32: a header, then items, then split rows.
        shared_items, shared_rows: int32, items of shared tokens, and the rows of these.
    """

    numbers: StaticNumbers
    shared_items: StaticTable
    shared_rows: StaticTable


class OwnTokens(NamedTuple):
    """The tokens that each row reads by itself, as far as they stay the same: where they begin.

    Args:
        sharing: tokens that rows share.
        seen: int64 [n], first token that each row sees.
        firsts: int64 [n], first token that each row reads by itself.
        starts: int64 [n], the tile's in which that is.
        num_shared: int64 [n], number of parts in which the shared tokens of each row are; None for no such tokens.
        sum_firsts: sum of `firsts`.
    """

    sharing: DecodeSharing
    seen: Tensor
    firsts: Tensor
    starts: Tensor
    num_shared: Tensor | None
    sum_firsts: int

    @classmethod
    def of(cls, seen: Tensor, sharing: DecodeSharing, tile_tokens: int) -> OwnTokens:
        """Return the own tokens of rows."""
        firsts, num_shared = seen, None
        if len(sharing.rows):
            firsts = seen.index_copy(0, sharing.rows, sharing.ends)
            num_shared = torch.zeros_like(seen).index_copy_(0, sharing.rows, sharing.num_parts)
        return cls(sharing, seen, firsts, firsts // tile_tokens * tile_tokens, num_shared, int(firsts.sum()))


class WrittenItems(NamedTuple):
    """The items that lie in the buffers.

    Args:
        sharing: tokens that rows share.
        num_real: see `DecodeRows`.
        counts: int64 [n], number of items of each row.
        owners: int64 [M], row of each item.
        parts: int64 [M], index of each item among those of its row.
        columns: views of the buffer, int32 [M]: position, table, first token and end of each item.
        shared_tables: view of the buffer, int32: table of each shared item.
    """

    sharing: DecodeSharing
    num_real: int
    counts: Tensor
    owners: Tensor
    parts: Tensor
    columns: tuple[Tensor, ...]
    shared_tables: Tensor


class WrittenDecodes:
    """Writes the work of layers with one number of query heads to a KV head, and remembers what it wrote.

    Args:
        tile_tokens: number of tokens of a program's tile.
        most: bounds of the largest step.
        num_kv_heads: K; each head has programs of its own.
        num_processors: number of processors of the GPU.
        buffers: where the work is written; nobody else writes there.
    """

    def __init__(
        self, tile_tokens: int, most: MostWork, num_kv_heads: int, num_processors: int, buffers: WorkBuffers
    ) -> None:
        self._tile_tokens, self._most, self._buffers = tile_tokens, most, buffers
        self._num_kv_heads, self._num_processors = num_kv_heads, num_processors
        self._own: OwnTokens | None = None
        self._written: WrittenItems | None = None

    def write(self, rows: DecodeRows, sharing: DecodeSharing) -> None:
        """Write the work of a step, in which some tokens are shared."""
        own, written, num_real = self._own, self._written, rows.num_real
        if own is None or own.sharing is not sharing or not torch.equal(own.seen, rows.firsts):
            own = self._own = OwnTokens.of(rows.firsts, sharing, self._tile_tokens)
        ends = rows.positions + 1
        # A row of padding has one token.
        num_tokens = int(ends.sum()) - (len(ends) - num_real) - own.sum_firsts
        length = split_length(num_tokens, self._num_kv_heads, self._num_processors, self._tile_tokens, num_real)
        counts = num_parts(ends - own.starts, num_real, length)
        is_same = written is not None and written.sharing is sharing and written.num_real == num_real
        if written is not None and is_same and torch.equal(written.counts, counts):
            self._write_again(written, rows, own, ends, length)
        else:
            self._written = None  # if writing fails, the next step does it again
            self._written = self._write_all(rows, own, length)

    def _write_again(self, written: WrittenItems, rows: DecodeRows, own: OwnTokens, ends: Tensor, length: int) -> None:
        """Write what changes in each step."""
        numbers: tuple[Tensor, ...] = rows.positions, rows.block_starts, own.firsts, ends
        if len(written.owners) != len(ends):  # some are split
            positions, tables, firsts, ends = (each.index_select(0, written.owners) for each in numbers)
            starts = own.starts.index_select(0, written.owners)
            numbers = positions, tables, *parts_of(starts, firsts, ends, written.parts, length)
        for column, each in zip(written.columns, numbers, strict=True):
            column.copy_(each)
        if len(written.shared_tables):
            written.shared_tables.copy_(rows.block_starts.index_select(0, written.sharing.item_rows))

    def _write_all(self, rows: DecodeRows, own: OwnTokens, length: int) -> WrittenItems:
        """Write all items."""
        sharing, most = own.sharing, self._most
        work = plan_decodes(
            rows.positions, own.firsts, rows.block_starts, rows.num_real, self._tile_tokens, length, own.num_shared
        )
        shared_items, shared_rows = sharing.work(rows.block_starts, work.places)
        num_items, num_split = len(work.items), len(work.split_rows)
        assert num_items <= most.num_items, f"{num_items} items, and there is room for {most.num_items}"
        assert num_split <= most.num_split, f"{num_split} split rows, and there is room for {most.num_split}"
        numbers = self._buffers.numbers.host
        numbers[0], numbers[1], numbers[SHARED_COUNT] = num_items, num_split, len(shared_items)
        items = numbers[HEADER : HEADER + ITEM * num_items].view(-1, ITEM)
        items.copy_(work.items)
        start = HEADER + ITEM * most.num_items
        numbers[start : start + SPLIT_ROWS * num_split].view(-1, SPLIT_ROWS).copy_(work.split_rows)
        _, tables, rows_table = self._buffers
        for table, entries in ((tables, shared_items), (rows_table, shared_rows)):
            assert entries.numel() <= len(table), f"{entries.numel()} numbers, and there is room for {len(table)}"
            table.write(entries.view(-1))
        shared = tables.host[: shared_items.numel()].view(-1, SHARED_ITEM)
        columns = tuple(items[:, column] for column in (POSITION, TABLE, FIRST, END))
        return WrittenItems(
            sharing, rows.num_real, work.counts, work.owners, work.parts, columns, shared[:, SHARED_TABLE]
        )
