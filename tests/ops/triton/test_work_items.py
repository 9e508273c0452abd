"""The items of attention cover what each row sees, once; this needs no Triton."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
import torch

from quire.ops.interface.ops import AttentionBatch
from quire.ops.triton.attention.splits import split_length
from quire.ops.triton.attention.work_items import SplitRows, WorkItem, plan_work
from quire.ops.triton.tiles import decode_tile, prefill_tile


def batch_of(spans: list[tuple[int, int]], window: int | None, chunk: int | None) -> AttentionBatch:
    """Return a batch of histories and rows; blocks of 16 tokens."""
    row_starts = list(accumulate((rows for _, rows in spans), initial=0))
    contexts = [history + rows for history, rows in spans]
    starts = list(accumulate((-(-context // 16) for context in contexts), initial=0))
    none = torch.empty(0, dtype=torch.int64)
    return AttentionBatch(none, row_starts, contexts, none, starts, window, chunk)


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (40, None), (None, 300)])
@pytest.mark.parametrize("group", [1, 3, 4, 24])
@pytest.mark.parametrize("num_processors", [1, 132])
def test_every_row_sees_its_tokens_once(window: int | None, chunk: int | None, group: int, num_processors: int) -> None:
    rng = random.Random(group)
    spans = [(rng.choice((0, 5, 511, 4000)), rng.choice((1, 1, 2, 70, 300))) for _ in range(12)]
    batch = batch_of(spans, window, chunk)
    decode, prefill = decode_tile(128, group, 2), prefill_tile(128, group, 2, (9, 0))
    work = plan_work(batch, group, decode, prefill, 2, num_processors)
    items = [*work.few, *work.parts, *work.many]
    seen: dict[int, list[tuple[int, int]]] = {}
    for item in items:
        tile = decode if item not in work.many else prefill
        assert item.num_rows * group <= tile.rows
        for idx in range(item.num_rows):
            first = max(item.first, batch.first_seen(item.position + idx))
            end = min(item.end, item.position + idx + 1)
            if first < end:
                seen.setdefault(item.first_row + idx, []).append((first, end))
    for (start, end), context, table in zip(
        pairwise(batch.row_starts), batch.context_lens, batch.block_starts, strict=False
    ):
        for row in range(start, end):
            position = context - (end - row)
            parts = sorted(seen[row])
            assert parts[0][0] == batch.first_seen(position)
            assert parts[-1][1] == position + 1
            assert all(one[1] == other[0] for one, other in pairwise(parts))
        assert all(item.table == table for item in items if start <= item.first_row < end)
    places = [item.place + idx for item in work.parts for idx in range(item.num_rows)]
    assert places == list(range(work.num_places))
    assert sum(rows.num_parts for rows in work.split_rows) == len(work.parts)


def test_long_contexts_are_split_where_processors_are_idle() -> None:
    tiles = decode_tile(128, 4, 2), prefill_tile(128, 4, 2, (9, 0))
    alone = plan_work(batch_of([(8191, 1)], None, None), 4, *tiles, 8, 132)
    assert len(alone.parts) == 8192 // 256  # two for each of 132 processors
    assert alone.split_rows == [SplitRows(0, 1, 0, len(alone.parts))]
    many = plan_work(batch_of([(8191, 1)] * 256, None, None), 4, *tiles, 8, 132)
    assert many.parts == []
    assert many.few[1] == WorkItem(1, 1, 8191, 512, 0, 8192)
    assert split_length(1_000_000, 8, 132, 64) % 64 == 0
