"""Shared beginnings of block tables: which are found, when they pay, and their items; this needs no Triton."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
import torch

from quire.ops.interface.ops import AttentionBatch
from quire.ops.triton.attention.decode_work import MostWork, plan_decodes
from quire.ops.triton.attention.shared_prefixes import MAX_RANGES, PrefixCandidate, SharingRule, find_shared
from quire.ops.triton.attention.shared_work import MostShared, Sharing
from quire.ops.triton.attention.splits import split_length
from quire.ops.triton.attention.work_items import Work, plan_work
from quire.ops.triton.tiles import Tile, decode_tile, prefill_tile, shared_tile

GROUP = 4
DECODE, PREFILL = decode_tile(128, GROUP, 2), prefill_tile(128, GROUP, 2, (9, 0))


def rule_of(block_size: int = 16, group: int = GROUP, least_bytes: float = 0.0) -> SharingRule:
    """Return the rule of bfloat16 and heads of 128."""
    tile = shared_tile(128, group, 2, (9, 0))
    return SharingRule.of(tile, decode_tile(128, group, 2), group, block_size, 512, 128, least_bytes)


def found_in(tables: list[list[int]], rule: SharingRule) -> list[tuple[list[int], int, int]]:
    """Return the rows, first token and end of each range that tables of whole blocks share, one row behind each."""
    starts = list(accumulate(map(len, tables), initial=0))
    ids = torch.tensor([block for table in tables for block in table])
    candidates = [
        PrefixCandidate(row, 1, start, len(table) * rule.block_size)
        for row, (start, table) in enumerate(zip(starts, tables, strict=False))
    ]
    found = find_shared(candidates, ids, rule).ranges
    return [(sorted(each.first_row for each in members), first, end) for members, first, end in found]


def own(count: int, seq: int) -> list[int]:
    """Return blocks that no other sequence has."""
    return [1_000_000 * (1 + seq) + idx for idx in range(count)]


def test_a_prefix_ends_where_a_tile_does() -> None:
    common = list(range(35))
    tables = [common + own(3, 0), own(38, 1), common + own(70, 2)]
    assert found_in(tables, rule_of()) == [([0, 2], 0, 512)]


def test_ranges_behind_each_other() -> None:
    """All share a system prompt, two of them what follows."""
    system, prompt = list(range(16)), list(range(100, 120))
    tables = [system + prompt + own(2, 0), system + own(40, 1), system + prompt + own(1, 2)]
    assert found_in(tables, rule_of()) == [([0, 1, 2], 0, 256), ([0, 2], 256, 576)]


def shared_by_definition(
    tables: list[list[int]], rule: SharingRule
) -> tuple[list[tuple[list[int], int, int]], list[int]]:
    """Return what `find_shared` finds: part by part, each as far as all of its tables are equal."""
    size = rule.unit // rule.block_size
    units = [[tuple(table[idx : idx + size]) for idx in range(0, len(table), size)] for table in tables]
    units = [each if not each or len(each[-1]) == size else each[:-1] for each in units]
    found, deciding = [], [rule.least_tokens] * len(tables)
    least = rule.least_tokens // rule.unit
    parts = [
        ([row for row, each in enumerate(units) if len(each) >= least and each[:least] == head], 0, 0)
        for head in {tuple(each[:least]): each[:least] for each in units if len(each) >= least}.values()
    ]
    while parts:
        rows, begin, depth = parts.pop()
        if len(rows) < 2:
            continue
        shortest = min((units[row] for row in rows), key=len)
        num_equal = next(
            (idx for idx, unit in enumerate(shortest) if any(units[row][idx] != unit for row in rows)), len(shortest)
        )
        end = num_equal * rule.unit
        if end - begin >= rule.least_tokens and rule.saved_bytes(len(rows), len(rows), end - begin) > 0:
            found.append((rows, begin, end))
            begin, depth = end, depth + 1
        for row in rows:
            deciding[row] = end + rule.unit
        if depth < MAX_RANGES:
            going_on = [row for row in rows if len(units[row]) > num_equal]
            parts += [
                ([row for row in going_on if units[row][num_equal] == unit], begin, depth)
                for unit in {units[row][num_equal] for row in going_on}
            ]
    return sorted(found), deciding


@pytest.mark.parametrize("seed", range(6))
def test_what_is_found_is_what_the_definition_says(seed: int) -> None:
    """In trees of tables and in chains, where each parts from the one before at another place."""
    rng = random.Random(seed)
    rule, tables = rule_of(), [own(80, 0)]
    for seq in range(1, 40):
        source = tables[-1] if seed % 2 else rng.choice(tables)
        table = source[: rng.randrange(len(source) + 1)] + own(rng.randrange(4, 40), seq)
        tables.insert(rng.randrange(len(tables)), table)
    starts = list(accumulate(map(len, tables), initial=0))
    ids = torch.tensor([block for table in tables for block in table])
    candidates = [
        PrefixCandidate(row, 1, start, len(table) * rule.block_size)
        for row, (start, table) in enumerate(zip(starts, tables, strict=False))
    ]
    found = find_shared(candidates, ids, rule)
    ranges = sorted(([each.first_row for each in members], first, end) for members, first, end in found.ranges)
    assert (ranges, found.deciding) == shared_by_definition(tables, rule)
    assert len(ranges) > 2


def test_too_short_a_range_is_left_to_those_who_share_more() -> None:
    """The first 320 tokens of all pay, the 64 that follow do not: they count to the range of two."""
    first, more, last = list(range(20)), list(range(100, 104)), list(range(200, 232))
    tables = [first + more + last + own(1, 0), first + more + own(9, 1), first + more + last, first + own(9, 3)]
    assert found_in(tables, rule_of()) == [([0, 1, 2, 3], 0, 320), ([0, 2], 320, 896)]


def test_a_table_that_is_the_beginning_of_another() -> None:
    tables = [list(range(20)), list(range(64)), list(range(64))]
    assert found_in(tables, rule_of()) == [([0, 1, 2], 0, 320), ([1, 2], 320, 1024)]


def test_nothing_is_shared() -> None:
    rule = rule_of()
    assert found_in([own(40, seq) for seq in range(5)], rule) == []
    assert found_in([list(range(15)), list(range(15))], rule) == []  # 240 tokens
    assert found_in([[], [7]], rule) == []
    # Later blocks that are equal: keys of a block are of all the tokens before it, so no cache has that.
    assert found_in([[1, *range(100, 140)], [2, *range(100, 140)]], rule) == []


def test_what_pays() -> None:
    """256 tokens of 512 bytes, twice: 131,072 bytes less, and two rows' partial results, written and read, more."""
    tables = [list(range(16))] * 2
    saved = 256 * 512 - 2 * 4 * (GROUP * 130 * 4)
    assert found_in(tables, rule_of(least_bytes=saved - 1)) == [([0, 1], 0, 256)]
    assert found_in(tables, rule_of(least_bytes=saved)) == []
    # Partial results of 64 query heads are more bytes than what two rows save; and no tile holds two such rows.
    assert found_in(tables, rule_of(group=32)) == []
    assert found_in([list(range(4096))] * 9, rule_of(group=64)) == []


@pytest.mark.parametrize("block_size", [1, 8, 48, 64, 256])
def test_block_sizes(block_size: int) -> None:
    rule = rule_of(block_size)
    assert rule.unit % block_size == 0
    assert rule.unit % 64 == 0
    tables = [list(range(1 + 700 // block_size)) + own(2, seq) for seq in range(2)]
    shared = (1 + 700 // block_size) * block_size // rule.unit * rule.unit
    assert found_in(tables, rule) == ([([0, 1], 0, shared)] if shared >= 256 else [])


def random_tables(rng: random.Random, contexts: list[int]) -> tuple[list[int], list[int]]:
    """Return block tables in which sequences go on from the beginnings of others, one behind the other, and starts."""
    tables: list[list[int]] = []
    new_ids = (7919 * idx % 100_003 for idx in range(1, 100_003))  # in no order, and each once
    for context in contexts:
        count = -(-context // 16)
        table = rng.choice(tables)[: rng.choice([0, 15, 16, 40, 100, 600])] if tables else []
        # The block with the row's own token is its own.
        table = table[: max(0, count - 20)]
        tables.append(table + [next(new_ids) for _ in range(count - len(table))])
    return [block for table in tables for block in table], list(accumulate(map(len, tables), initial=0))


def reads_of(work: Work, batch: AttentionBatch) -> dict[int, list[tuple[int, int, int]]]:
    """Return for each row the parts that it reads: (place of the partial result, first token, end)."""
    ids = batch.block_ids
    reads: dict[int, list[tuple[int, int, int]]] = {row: [] for row in range(batch.row_starts[-1])}
    tables = {
        row: ids[start:stop]
        for (first, end), (start, stop) in zip(pairwise(batch.row_starts), pairwise(batch.block_starts), strict=True)
        for row in range(first, end)
    }
    for item in (*work.few, *work.parts, *work.many):
        for idx in range(item.num_rows):
            behind = item.position + idx + 1
            first = min(max(item.first, batch.first_seen(behind - 1)), behind)
            place = -1 if item.place < 0 else item.place + idx
            reads[item.first_row + idx].append((place, first, max(first, min(item.end, behind))))
    for shared in work.shared.items:
        assert shared.first % DECODE.tokens == 0
        assert shared.end % DECODE.tokens == 0
        blocks = slice(shared.first // 16, shared.end // 16)
        for row in work.shared.rows[shared.first_row : shared.first_row + shared.num_rows]:
            assert torch.equal(tables[row.row][blocks], ids[shared.table :][blocks])
            reads[row.row].append((row.place + shared.part * row.stride, shared.first, shared.end))
    return reads


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (700, None), (None, 2048)])
@pytest.mark.parametrize("num_processors", [1, 132])
def test_every_row_sees_its_tokens_once(window: int | None, chunk: int | None, num_processors: int) -> None:
    rng = random.Random(num_processors)
    num_shared = 0
    for _ in range(8):
        contexts = [rng.choice([40, 600, 650, 2000, 9000]) + rng.randrange(40) for _ in range(rng.randint(2, 24))]
        counts = [rng.choice([1, 1, 1, 3, 20]) for _ in contexts]
        ids, starts = random_tables(rng, contexts)
        row_starts = list(accumulate(counts, initial=0))
        none = torch.empty(0, dtype=torch.int64)
        batch = AttentionBatch(none, row_starts, contexts, torch.tensor(ids), starts, window, chunk)
        rule = rule_of()
        work = plan_work(batch, GROUP, DECODE, PREFILL, 2, num_processors, rule)
        num_shared += len(work.shared.items)
        assert all(item.num_rows * GROUP <= rule.tile.rows for item in work.shared.items)
        places: list[int] = []
        split = {
            rows.first_row + idx: [rows.place + part * rows.num_rows + idx for part in range(rows.num_parts)]
            for rows in work.split_rows
            for idx in range(rows.num_rows)
        }
        reads = reads_of(work, batch)
        for (start, end), context in zip(pairwise(row_starts), contexts, strict=True):
            for row in range(start, end):
                position = context - (end - row)
                parts = sorted(reads[row], key=lambda each: each[1:])
                assert parts[0][1] == batch.first_seen(position)
                assert max(part[2] for part in parts) == position + 1
                assert all(one[2] == other[1] for one, other in pairwise(parts))
                assert [part[0] for part in parts] == split.get(row, [-1] * len(parts))
                places.extend(split.get(row, []))
        assert sorted(places) == list(range(work.num_places))
    assert num_shared > (10 if window is chunk is None and num_processors > 1 else 1)


def test_sequences_that_do_not_see_their_beginning_share_nothing() -> None:
    ids = torch.tensor(list(range(100)) * 2)
    none = torch.empty(0, dtype=torch.int64)
    for window, chunk, expected in (
        (None, None, 1),
        (1600, None, 1),
        (1599, None, 0),
        (None, 1600, 1),
        (None, 1599, 0),
    ):
        batch = AttentionBatch(none, [0, 1, 2], [1600, 1600], ids, [0, 100, 200], window, chunk)
        work = plan_work(batch, GROUP, DECODE, PREFILL, 8, 1, rule_of())
        assert len(work.shared.items) == expected, (window, chunk)


@pytest.mark.parametrize("seed", range(8))
def test_decodes_planned_at_once_have_the_work_of_the_slow_planner(seed: int) -> None:
    """And it fits into the room that captured steps have."""
    rng = random.Random(seed)
    heads, processors = rng.choice([1, 2, 8]), rng.choice([2, 20, 132])
    contexts = [rng.choice([300, 700, 2000, 9000]) + rng.randrange(30) for _ in range(rng.randint(2, 40))]
    ids, starts = random_tables(rng, contexts)
    tables = torch.tensor(ids)
    none = torch.empty(0, dtype=torch.int64)
    batch = AttentionBatch(none, range(len(contexts) + 1), contexts, tables, starts)
    rule = rule_of()
    expected = plan_work(batch, GROUP, DECODE, PREFILL, heads, processors, rule)
    positions = torch.tensor(contexts) - 1
    candidates = [
        PrefixCandidate(row, 1, start, context - 1)
        for row, (start, context) in enumerate(zip(starts, contexts, strict=False))
    ]
    sharing = Sharing.of(find_shared(candidates, tables, rule).ranges, rule, heads, processors)
    firsts = torch.tensor([sharing.ends.get(row, 0) for row in range(len(contexts))])
    num_shared = torch.tensor([sharing.num_parts.get(row, 0) for row in range(len(contexts))])
    length = split_length(int((positions + 1 - firsts).sum()), heads, processors, DECODE.tokens, len(contexts))
    table_starts = torch.tensor(starts[:-1])
    work = plan_decodes(positions, firsts, table_starts, len(contexts), DECODE.tokens, length, num_shared)
    items = {tuple(item[:7]) for item in work.items.tolist()}
    assert items == {tuple(item) for item in (*expected.few, *expected.parts)}
    assert work.split_rows.tolist() == [list(each) for each in expected.split_rows]
    assert sharing.work(dict(work.split_rows[:, ::2].tolist())) == expected.shared
    most_shared = MostShared.of(len(contexts), rule.tile_rows, heads, processors)
    most = MostWork.of(len(contexts), DECODE.tokens, heads, processors).with_shared(len(contexts), most_shared)
    assert len(work.items) <= most.num_items
    assert len(work.split_rows) <= most.num_split
    assert expected.num_places <= most.num_places
    assert len(expected.shared.items) <= most_shared.num_items
    assert len(expected.shared.rows) <= most_shared.num_rows


def test_a_sequence_is_in_few_ranges() -> None:
    """Each sequence goes on where the one before ends: without a limit, the rows of ranges grow with the square."""
    tables = [list(range(16 * (1 + seq))) + own(1, seq) for seq in range(12)]
    found = found_in(tables, rule_of())
    in_ranges = [sum(row in rows for rows, _, _ in found) for row in range(12)]
    assert max(in_ranges) == MAX_RANGES
    assert found[0] == (list(range(12)), 0, 256)


def test_the_tile_of_shared_tokens() -> None:
    assert shared_tile(128, 4, 2, (9, 0)) == Tile(64, 64, 8, 3)
    assert shared_tile(128, 4, 2, (8, 0)) == Tile(64, 64, 8, 2)
    assert shared_tile(128, 100, 2, (9, 0)).rows == 128
    assert shared_tile(128, 4, 2, (9, 0), is_int8=True).tokens == 32
    assert rule_of().tile_rows == 16
