"""Block tables of captured decodes in static memory, where they stay from step to step.

```
 | table 0 | room | table 1 | room | ... | 0, the null block |
```

While the rows are the same, and their tables have only grown, a step writes the entries that are new, and tables that
have changed otherwise. Where there is no room for them, all tables are written, each with room for blocks to come if
the memory has it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from torch import Tensor

from quire.execution.batch import BlockTable
from quire.ops.static_steps import StaticTable, vector

# Blocks that a table can grow by before all are written again.
ROOM: Final = 16


class PlacedTables(NamedTuple):
    """Block tables of a step, on the host.

    Args:
        block_ids: int64, tables at any places, and 0 for the null block at the end; until the next step.
        block_starts: int64 [n], where each table starts.
        stamps: see `BlockTable`, one for each row; nobody changes the list.
    """

    block_ids: Tensor
    block_starts: Tensor
    stamps: list[int]


class LaidTables:
    """Lays the block tables of one cache group out, and remembers them.

    Args:
        table: static memory for them; nobody else writes there.
        block_size: N.
    """

    def __init__(self, table: StaticTable, block_size: int) -> None:
        self._host, self._block_size = table.host, block_size
        memory = (ctypes.c_char * self._host.nbytes).from_address(self._host.data_ptr())
        self._numbers = memoryview(memory).cast("B").cast("q")
        # Whether whole tables lie there, and not only what steps have read so far.
        self._is_whole = False
        self._num_blocks: list[int] = []
        self._starts: list[int] = [0]
        self._placed: PlacedTables | None = None

    def lay(
        self, tables: Sequence[BlockTable], positions: Sequence[int], changed: Sequence[int] | None = None
    ) -> PlacedTables:
        """Lay tables out; nothing reads the static memory meanwhile.

        Args:
            tables: table of each row.
            positions: position of each row in its sequence: what lies behind the block of that is not read.
            changed: rows, rising; tables and entries of all others are those of the last call. None where any may
                differ.
        """
        placed, self._placed = self._placed, None  # if writing fails, the next step writes all
        if placed is not None and self._is_whole and len(tables) == len(placed.stamps):
            rows = range(len(tables)) if changed is None else changed
            placed = self._write_new(tables, rows, placed)
        else:
            placed = None
        self._placed = placed = placed or self._lay_all(tables, positions)
        return placed

    def _write_new(
        self, tables: Sequence[BlockTable], rows: Sequence[int], placed: PlacedTables
    ) -> PlacedTables | None:
        """Write what is new in some rows; return None where there is no room for it."""
        known, starts, before, stamps = self._num_blocks, self._starts, placed.stamps, None
        for row in rows:
            table, first = tables[row], known[row]
            ids = table.ids
            if table.stamp != before[row]:
                stamps = before.copy() if stamps is None else stamps
                stamps[row] = table.stamp
                first = 0  # nothing of the row is known
            elif len(ids) == first:
                continue
            start, number = starts[row], len(ids)
            if start + number > starts[row + 1]:
                return None
            self._numbers[start + first : start + number] = ids[first:]
            known[row] = number
        return placed if stamps is None else placed._replace(stamps=stamps)

    def _lay_all(self, tables: Sequence[BlockTable], positions: Sequence[int]) -> PlacedTables:
        """Write all tables."""
        num_blocks = [len(table.ids) for table in tables]
        num_numbers = sum(num_blocks)
        self._is_whole = num_numbers < len(self._host)
        if not self._is_whole:
            num_blocks = [position // self._block_size + 1 for position in positions]
        room = ROOM if num_numbers + ROOM * len(num_blocks) < len(self._host) else 0
        self._num_blocks = num_blocks
        self._starts = starts = list(accumulate((number + room for number in num_blocks), initial=0))
        for table, start, number in zip(tables, starts, num_blocks, strict=False):
            self._numbers[start : start + number] = table.first(number)
        self._numbers[starts[-1]] = 0
        return PlacedTables(self._host[: starts[-1] + 1], vector(starts[:-1]), [table.stamp for table in tables])
