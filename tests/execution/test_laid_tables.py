"""Block tables in static memory: what lies there after each step is what the tables have."""

from __future__ import annotations

import random

import pytest
import torch

from quire.execution.capture.laid_tables import LaidTables
from quire.execution.step.batch import BlockTable
from quire.memory.results import TableDelta
from quire.ops.interface.static_steps import StaticMemory


def change(rng: random.Random, tables: list[BlockTable]) -> None:
    """Change tables as between two steps: mostly, some grow."""
    table = rng.choice(tables)
    idx = rng.randrange(len(table.ids))
    match rng.randrange(20):
        case 0:
            tables.remove(table)
        case 1:
            tables.append(BlockTable())
            tables[-1].change(TableDelta(0, 0, tuple(range(1, rng.randrange(2, 60)))))
        case 2:
            table.change(TableDelta(0, idx, (rng.randrange(1000), *table.ids[idx + 1 :])))
        case 3:
            table.change(TableDelta(0, 1 + idx, ()))
        case 4:
            tables.reverse()
        case _:
            table.change(TableDelta(0, len(table.ids), tuple(rng.sample(range(1000), rng.choice([1, 1, 1, 20])))))


@pytest.mark.parametrize("most_rows", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_tables_that_grow_in_their_places(seed: int, most_rows: int) -> None:
    """In memory of more and of less than tables with room behind them need; a table may be that of several rows."""
    rng = random.Random(seed)
    static = StaticMemory(torch.device("cpu")).take_table(1200 if seed % 2 else 400, torch.int64)
    laid, tables, num_same, starts = LaidTables(static, 1), [BlockTable()], 0, None
    num_told = 0
    tables[0].change(TableDelta(0, 0, (7,)))
    before: list[tuple[BlockTable, int, int]] = []
    for _ in range(400):
        # A table may have slots for tokens to come.
        counts = [len(table.ids) - rng.choice([0, 0, 0, len(table.ids) > 1]) for table in tables]
        if sum(counts) >= len(static):
            del tables[1:]
            continue
        seen = [(table, table.stamp, len(table.ids)) for table in tables]
        changed = None
        is_same = [table for table, *_ in seen] == [table for table, *_ in before]
        if most_rows == 1 and is_same and rng.random() < 0.7:
            changed = [row for row, (now, then) in enumerate(zip(seen, before, strict=True)) if now != then]
        rows = [
            (table, count - back)
            for table, count in zip(tables, counts, strict=True)
            for back in reversed(range(min(count, rng.randint(1, most_rows))))
        ]
        of_rows = [table for table, _ in rows]
        placed, before = laid.lay(of_rows, [count - 1 for _, count in rows], changed), seen
        num_told += changed is not None
        assert placed.block_ids.data_ptr() == static.host.data_ptr()
        for (table, count), start in zip(rows, placed.block_starts.tolist(), strict=True):
            assert placed.block_ids[start : start + count].tolist() == table.ids[:count].tolist()
        assert placed.block_ids[-1] == 0
        assert placed.stamps == [table.stamp for table in of_rows]
        num_same += placed.block_starts is starts
        starts = placed.block_starts
        change(rng, tables)
        if not tables:
            tables.append(BlockTable())
            tables[0].change(TableDelta(0, 0, (7,)))
    assert num_same > 50 or most_rows > 1
    assert num_told > 50 or most_rows > 1
    assert len(laid.lay([], []).block_ids) == 1


def test_a_stamp_stays_while_a_table_grows() -> None:
    table = BlockTable()
    stamps = [table.stamp]
    for delta, is_same in (
        (TableDelta(0, 0, (5, 6)), True),
        (TableDelta(0, 2, (7,)), True),
        (TableDelta(0, 3, ()), True),
        (TableDelta(0, 2, (8,)), False),
        (TableDelta(0, 1, ()), False),
        (TableDelta(0, 1, (6,)), True),
        (TableDelta(0, 0, (5, 9)), False),
    ):
        table.change(delta)
        assert (table.stamp == stamps[-1]) == is_same, delta
        stamps.append(table.stamp)
    assert BlockTable().stamp not in stamps
