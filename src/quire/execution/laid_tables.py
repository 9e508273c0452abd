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
        stamps: see `BlockTable`, one for each row.
    """

    block_ids: Tensor
    block_starts: Tensor
    stamps: list[int]


class LaidTables:
    """Lays the block tables of one cache group out, and remembers them.

    Args:
        table: static memory for them; nobody else writes there.
    """

    def __init__(self, table: StaticTable) -> None:
        self._host = table.host
        memory = (ctypes.c_char * self._host.nbytes).from_address(self._host.data_ptr())
        self._numbers = memoryview(memory).cast("B").cast("q")
        self._num_blocks: list[int] = []
        self._starts: list[int] = [0]
        self._placed: PlacedTables | None = None

    def lay(self, tables: Sequence[BlockTable], num_blocks: Sequence[int]) -> PlacedTables:
        """Lay out the first blocks of each table; nothing reads the static memory meanwhile."""
        stamps = [table.stamp for table in tables]
        placed, self._placed = self._placed, None  # if writing fails, the next step writes all
        if placed is None or not self._write_new(tables, num_blocks, stamps, placed.stamps):
            placed = self._lay_all(tables, num_blocks, stamps)
        elif stamps != placed.stamps:
            placed = placed._replace(stamps=stamps)
        self._placed = placed
        return placed

    def _write_new(
        self, tables: Sequence[BlockTable], num_blocks: Sequence[int], stamps: list[int], before: list[int]
    ) -> bool:
        """Write what is new in each row; return whether there is room for it."""
        known, starts = self._num_blocks, self._starts
        if len(stamps) != len(before):
            return False
        for row, (number, first, stamp, old) in enumerate(zip(num_blocks, known, stamps, before, strict=True)):
            if stamp != old:
                first = 0  # nothing of the row is known
            elif number <= first:
                continue
            start = starts[row]
            if start + number > starts[row + 1]:
                return False
            self._numbers[start + first : start + number] = tables[row].ids[first:number]
            known[row] = number
        return True

    def _lay_all(self, tables: Sequence[BlockTable], num_blocks: Sequence[int], stamps: list[int]) -> PlacedTables:
        """Write all tables."""
        room = ROOM if sum(num_blocks) + ROOM * len(num_blocks) < len(self._host) else 0
        self._num_blocks = list(num_blocks)
        self._starts = starts = list(accumulate((number + room for number in num_blocks), initial=0))
        for table, start, number in zip(tables, starts, num_blocks, strict=False):
            self._numbers[start : start + number] = table.first(number)
        self._numbers[starts[-1]] = 0
        return PlacedTables(self._host[: starts[-1] + 1], vector(starts[:-1]), stamps)
