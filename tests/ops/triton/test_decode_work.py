"""The work of decodes, planned for all rows at once, against the planner that goes from row to row."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch

from quire.ops.interface import AttentionBatch
from quire.ops.triton.decode_work import MostWork, plan_decodes
from quire.ops.triton.splits import split_length
from quire.ops.triton.tiles import Tile
from quire.ops.triton.work_items import WorkItem, plan_work


def batch_of(positions: list[int], window: int | None, chunk: int | None) -> AttentionBatch:
    """Return decodes at some positions, in blocks of 16 tokens."""
    starts = list(accumulate((position // 16 + 1 for position in positions), initial=0))
    lens = [position + 1 for position in positions]
    ids = torch.zeros(starts[-1], dtype=torch.int64)
    return AttentionBatch(ids, range(len(positions) + 1), lens, ids, starts, window, chunk)


@pytest.mark.parametrize("seed", range(40))
def test_work_on_all_rows_at_once_is_that_of_the_slow_planner(seed: int) -> None:
    rng = random.Random(seed)
    window, chunk = rng.choice([(None, None), (rng.choice([1, 100, 1000]), None), (None, rng.choice([7, 512]))])
    positions = [rng.choice([0, 15, 63, 300, 2000, 9000, rng.randrange(5000)]) for _ in range(rng.randint(1, 40))]
    heads, processors, tile = rng.choice([1, 2, 8]), rng.choice([2, 20, 132]), Tile(16, rng.choice([16, 32, 64]), 4, 3)
    batch = batch_of(positions, window, chunk)
    expected = plan_work(batch, 1, tile, tile, heads, processors)
    firsts = [batch.first_seen(position) for position in positions]
    total = sum(position + 1 - first for position, first in zip(positions, firsts, strict=True))
    length = split_length(total, heads, processors, tile.tokens)
    rows, seen, tables = torch.tensor([positions, firsts, batch.block_starts[:-1]])
    found = plan_decodes(rows, seen, tables, len(positions), tile.tokens, length)
    items = {WorkItem(*item[:7]) for item in found.items.tolist()}
    assert len(items) == len(found.items)
    assert items == {*expected.few, *expected.parts}
    assert found.split_rows.tolist() == [list(each) for each in expected.split_rows]
    most = MostWork.of(len(positions), tile.tokens, heads, processors)
    assert len(found.items) <= most.num_items
    assert len(expected.parts) <= most.num_places
    assert len(found.split_rows) <= most.num_split


def test_padding_is_not_split() -> None:
    """Rows that are not real look at one token, however short splits are."""
    found = plan_decodes(torch.tensor([40, 0, 0]), torch.zeros(3).long(), torch.tensor([0, 3, 3]), 1, 16, 16)
    assert [item[0] for item in found.items.tolist()] == [0, 0, 0, 1, 2]
    assert found.items[3:, 4:7].tolist() == [[0, 1, -1]] * 2
