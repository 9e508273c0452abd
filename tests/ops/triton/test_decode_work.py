"""The work of decodes, planned for all rows at once, against the planner that goes from row to row."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch

from quire.ops.cpu.native_decode_work import DecodeWorkKernels
from quire.ops.interface.ops import AttentionBatch
from quire.ops.interface.static_steps import StaticMemory
from quire.ops.triton.attention.decode_sharing import DecodeSharing, SharedDecodes, no_sharing
from quire.ops.triton.attention.decode_work import ITEM, SPLIT_ROWS, MostWork, plan_decodes
from quire.ops.triton.attention.decode_writer import (
    HEADER,
    SHARED_COUNT,
    DecodeRows,
    DecodeWriter,
    WorkBuffers,
    decode_kernels,
)
from quire.ops.triton.attention.shared_prefixes import SharingRule
from quire.ops.triton.attention.shared_work import SHARED_ITEM, SHARED_ROW, MostShared
from quire.ops.triton.attention.splits import split_length
from quire.ops.triton.attention.step_numbers import step_kernels
from quire.ops.triton.attention.work_items import WorkItem, plan_work
from quire.ops.triton.tiles import Tile, decode_tile, shared_tile

BLOCK_SIZE, GROUP, KV_HEADS = 16, 4, 2
DECODE = decode_tile(128, GROUP, 2)
RULE = SharingRule.of(shared_tile(128, GROUP, 2, (9, 0)), DECODE, GROUP, BLOCK_SIZE, 512, 128, 0.0)
MOST_ROWS = 12


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
    length = split_length(total, heads, processors, tile.tokens, len(positions))
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


def positions_later(rng: random.Random, positions: list[int]) -> list[int]:
    """Return the positions of a step later; a sequence may have gone, or come, or been taken back."""
    later = [position + 1 for position in positions]
    match rng.randrange(12):
        case 0:
            del later[rng.randrange(len(later))]
        case 1:
            later.append(rng.choice([3, 700, 5000]))
        case 2:
            later[rng.randrange(len(later))] = rng.choice([40, 900])
    return later[:MOST_ROWS] or [3]


@pytest.mark.parametrize("seed", range(3))
def test_compiled_code_writes_what_stock_operators_write(seed: int) -> None:
    """Over steps of decodes, with padding and windows, where items of all rows begin to be split and to share."""
    rng = random.Random(seed)
    window, processors = [(None, 2), (None, 132), (400, 2)][seed]
    buffers, twin_buffers = make_buffers(processors), make_buffers(processors)
    kernels = decode_kernels()
    if kernels is None:
        pytest.skip("there is no compiled code")
    writer, twin = make_writer(processors, buffers, kernels), make_writer(processors, twin_buffers)
    finder = SharedDecodes(RULE, KV_HEADS, processors, step_kernels())
    positions = [600 + rng.randrange(100) for _ in range(6)]
    num_split = num_shared = 0
    tables = [[*range(32), *range(1000 * row, 1000 * row + 320)] for row in range(1, MOST_ROWS + 1)]
    for step in range(80):
        real, stamps = torch.tensor(positions), list(range(len(positions)))
        counts = [position // BLOCK_SIZE + 1 for position in positions]
        ids = torch.tensor([block for table, count in zip(tables, counts, strict=False) for block in table[:count]])
        starts = torch.tensor([*accumulate(counts, initial=0)][:-1])
        firsts = torch.zeros_like(real) if window is None else (real + 1 - window).clamp(min=0)
        # Now and then, what is shared is not read once.
        shares = finder.find(real, firsts, ids, starts, stamps) and step % 50 < 40
        sharing = finder.sharing if shares else no_sharing()
        padding = torch.zeros(rng.choice([0, 2]) if step % 10 == 0 else 0, dtype=torch.int64)
        padded = [torch.cat((each, padding)) for each in (real, firsts, starts)]
        rows = DecodeRows(padded[0], padded[1], padded[2], len(positions))
        writer.write(rows, sharing)
        twin.write(rows, sharing)
        assert numbers_of(buffers, sharing) == numbers_of(twin_buffers, sharing)
        for table, expected in zip(buffers[1:], twin_buffers[1:], strict=True):
            assert table._chunk.used == expected._chunk.used, "as much is copied to the device"
        num_split += int(buffers.numbers.host[1])
        num_shared += int(buffers.numbers.host[SHARED_COUNT])
        positions = positions_later(rng, positions)
    assert num_split > 80 or window is not None
    assert num_shared > 20 or window is not None


def make_buffers(num_processors: int) -> WorkBuffers:
    """Return static buffers of a cache group."""
    memory, (most, shared) = StaticMemory(torch.device("cpu")), most_of(num_processors)
    return WorkBuffers(
        memory.take(HEADER + ITEM * most.num_items + SPLIT_ROWS * most.num_split, torch.int32),
        memory.take_table(SHARED_ITEM * shared.num_items, torch.int32),
        memory.take_table(SHARED_ROW * shared.num_rows, torch.int32),
    )


def most_of(num_processors: int) -> tuple[MostWork, MostShared]:
    """Return the bounds of the largest step."""
    shared = MostShared.of(MOST_ROWS + 2, RULE.tile_rows, KV_HEADS, num_processors)
    most = MostWork.of(MOST_ROWS + 2, DECODE.tokens, KV_HEADS, num_processors)
    return most.with_shared(MOST_ROWS + 2, shared), shared


def make_writer(num_processors: int, buffers: WorkBuffers, kernels: DecodeWorkKernels | None = None) -> DecodeWriter:
    """Return a writer by compiled code, or by stock operators."""
    most = most_of(num_processors)[0]
    return DecodeWriter(DECODE.tokens, most, MOST_ROWS + 2, KV_HEADS, num_processors, buffers, kernels)


def numbers_of(buffers: WorkBuffers, sharing: DecodeSharing) -> list[list[int]]:
    """Return header, items, split rows, shared items and their rows, as far as kernels read them."""
    numbers, most = buffers.numbers.host, most_of(2)[0]
    num_items, num_split = numbers[:2].tolist()
    start = len(numbers) - SPLIT_ROWS * most.num_split
    return [
        numbers[: HEADER + ITEM * num_items].tolist(),
        numbers[start : start + SPLIT_ROWS * num_split].tolist(),
        buffers.shared_items.host[: sharing.items.numel()].tolist(),
        buffers.shared_rows.host[: sharing.item_members.numel()].tolist(),
    ]
