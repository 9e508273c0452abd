"""Block tables of captured decodes, which stay in static memory from step to step.

```
 | table | room | table | room | (a table of an earlier step) | table | room | ... | 0, the null block |
```

A table keeps its place while it has room to grow, in whichever row it is: a step writes only appended entries, and
whole tables that were changed otherwise. A new table is placed after all others. If the memory is full, or mostly
holds tables of earlier steps, it is compacted: all tables are written again, with room to grow if the memory has it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from operator import itemgetter
from typing import Final, NamedTuple

from torch import Tensor

from quire.execution.step.batch import BlockTable
from quire.ops.interface.static_steps import StaticTable, vector

# Blocks that a table can grow by before all are written again.
ROOM: Final = 16


class PlacedTables(NamedTuple):
    """Block tables of a step, on the host.

    Args:
        block_ids: int64, tables at any offsets, then a 0, the null block; valid until the next step.
        block_starts: int64 [n], offset of each row's table.
        stamps: stamp of each row's `BlockTable`; the list is never changed.
    """

    block_ids: Tensor
    block_starts: Tensor
    stamps: list[int]


class TablePlace:
    """The place of a table in static memory."""

    __slots__ = ("end", "num_known", "stamp", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.num_known, self.stamp = 0, 0


class LaidTables:
    """Lays out the block tables of one cache group, and remembers their places."""

    def __init__(self, table: StaticTable, block_size: int) -> None:
        self._host, self._block_size = table.host, block_size
        memory = (ctypes.c_char * self._host.nbytes).from_address(self._host.data_ptr())
        self._numbers = memoryview(memory).cast("B").cast("q")
        self._places: dict[BlockTable, TablePlace] = {}
        # Places of the rows of the last step; with None, the next step writes all tables again.
        self._rows: list[TablePlace] | None = None
        self._placed = PlacedTables(self._host[:1], vector(()), [])
        # Offset of the null block; and the numbers of rows and of entries (with room) at the last compaction.
        self._end = self._num_rows = self._num_entries = 0

    def lay(
        self, tables: Sequence[BlockTable], positions: Sequence[int], changed: Sequence[int] | None = None
    ) -> PlacedTables:
        """Lay tables out; nothing may read the static memory during the call."""
        rows, self._rows = self._rows, None  # if writing fails, the next step writes all tables
        if rows is None or (changed is None and 2 * len(tables) < self._num_rows):
            return self._lay_all(tables, positions)
        are_same = changed is not None
        if changed is None:
            rows, changed = list(map(self._place_of, tables)), range(len(tables))
        for row in changed:
            table = tables[row]
            # Another row of the same sequence may have moved the table.
            place = rows[row] = self._places[table]
            if len(table.ids) == place.num_known and table.stamp == place.stamp:
                continue
            if table.stamp != place.stamp:
                place.num_known, are_same = 0, False
            if len(table.ids) > place.end - place.start:
                place, are_same = self._make_place(table, len(table.ids) + ROOM), False
                rows[row] = place
            if self._end >= len(self._host):
                return self._lay_all(tables, positions)
            self._write(table, place, len(table.ids))
        if self._end > 2 * self._num_entries + ROOM:
            return self._lay_all(tables, positions)
        self._rows = rows
        if not are_same:
            self._put_rows(tables, rows)
        return self._placed

    def _place_of(self, table: BlockTable) -> TablePlace:
        place = self._places.get(table)
        return self._make_place(table, len(table.ids) + ROOM) if place is None else place

    def _make_place(self, table: BlockTable, num_entries: int) -> TablePlace:
        """Return a place for a table after all others; it may exceed the memory, which callers check."""
        start, self._end = self._end, self._end + num_entries
        place = self._places[table] = TablePlace(start, self._end)
        return place

    def _write(self, table: BlockTable, place: TablePlace, num_blocks: int) -> None:
        """Write the entries of a table that have not been written yet."""
        start, known = place.start, place.num_known
        self._numbers[start + known : start + num_blocks] = table.ids[known:num_blocks]
        place.num_known, place.stamp = num_blocks, table.stamp

    def _put_rows(self, tables: Sequence[BlockTable], rows: Sequence[TablePlace]) -> None:
        """Terminate the tables by the null block, and keep the offsets and stamps of the rows' tables."""
        self._numbers[self._end] = 0
        starts, stamps = vector([place.start for place in rows]), [table.stamp for table in tables]
        self._placed = PlacedTables(self._host[: self._end + 1], starts, stamps)

    def _lay_all(self, tables: Sequence[BlockTable], positions: Sequence[int]) -> PlacedTables:
        """Compact: write the tables of a step from the start of the memory, and drop tables of earlier steps."""
        self._places.clear()
        self._end = 0
        num_blocks = {table: len(table.ids) for table in tables}
        total = sum(num_blocks.values())
        room = ROOM if total + ROOM * len(num_blocks) < len(self._host) else 0
        if total >= len(self._host):
            # Write only the entries that the step reads: they fit, or it would not have been taken. The next compacts.
            for table, position in sorted(zip(tables, positions, strict=True), key=itemgetter(1)):
                num_blocks[table] = position // self._block_size + 1
        for table, number in num_blocks.items():
            self._write(table, self._make_place(table, number + room), number)
        rows = list(map(self._places.__getitem__, tables))
        self._num_rows, self._num_entries = len(rows), self._end
        self._put_rows(tables, rows)
        self._rows = rows if total < len(self._host) else None
        return self._placed
