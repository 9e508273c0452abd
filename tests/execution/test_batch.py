"""The batch builder against its slow twin: whole tables as lists, slots token by token."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import quire.execution.step.batch
from quire.execution.step.batch import BatchBuilder, end_rows
from quire.execution.step.row_layout import layout_kernels
from quire.memory.results import NO_OPS
from quire.models.specs.spec import StateCacheShape, TokenCacheShape
from quire.ops.interface.ops import AttentionBatch, StateBatch
from quire.scheduling.plan import NewSequence, ScheduledSequence, StepPlan, TableDelta
from quire.sequences.params import SamplingParams

KEPT = (TokenCacheShape(2, 8), TokenCacheShape(2, 8, window=7), StateCacheShape(2, 8))
CHUNKED = TokenCacheShape(2, 8, chunk=6)
ALL = KEPT[:1]
OPENING = NewSequence(SamplingParams(), 0, 0, 1, (1,), ())


@pytest.fixture(autouse=True, params=[True, False], ids=["compiled", "loops"])
def _layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay rows out by compiled code, and without any."""
    if request.param and layout_kernels() is None:
        pytest.skip("there is no compiled code")
    if not request.param:
        monkeypatch.setattr(quire.execution.step.batch, "layout_kernels", lambda: None)


def item(seq_id: int, start: int, token_ids: list[int], *deltas: TableDelta, is_new: bool = False) -> ScheduledSequence:
    return ScheduledSequence(seq_id, start, token_ids, deltas, 1, OPENING if is_new else None)


def plan(*items: ScheduledSequence, finished_ids: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(1, items, NO_OPS, finished_ids)


def expect(builder: BatchBuilder, step: StepPlan, tables: dict[int, list[list[int]]], block_size: int) -> None:
    """Build a step and compare it with what whole tables (by sequence and group) say."""
    batch = builder.build(step)
    tokens = [token for each in step.items for token in each.token_ids]
    places = [(each, each.start + idx) for each in step.items for idx in range(len(each.token_ids))]
    starts = [sum(len(each.token_ids) for each in step.items[:end]) for end in range(len(step.items) + 1)]
    assert batch.input_ids.tolist() == tokens
    assert batch.positions.tolist() == [position for _, position in places]
    assert batch.row_starts == starts
    ends = [each.start + len(each.token_ids) for each in step.items]
    num_blocks = [-(-end // block_size) for end in ends]
    for group_idx, attention in enumerate(batch.groups):
        if isinstance(attention, StateBatch):
            assert attention.block_ids == [tables[each.seq_id][group_idx][-1] for each in step.items]
            assert list(attention.row_starts) == starts
            assert attention.has_state == [each.start > 0 for each in step.items]
            continue
        assert (attention.window, attention.chunk) == KEPT[group_idx][2:]
        assert list(attention.row_starts) == starts
        assert list(attention.context_lens) == ends
        used = [tables[each.seq_id][group_idx][:n] for each, n in zip(step.items, num_blocks, strict=True)]
        assert attention.block_ids.tolist() == [block_id for table in used for block_id in table]
        assert list(attention.block_starts) == [sum(map(len, used[:end])) for end in range(len(used) + 1)]
        slots = [
            tables[each.seq_id][group_idx][position // block_size] * block_size + position % block_size
            for each, position in places
        ]
        assert attention.slot_mapping.tolist() == slots
        for tensor in (batch.input_ids, batch.positions, attention.slot_mapping, attention.block_ids):
            assert tensor.dtype == torch.int64


def test_prompt_then_tokens_then_a_copied_block() -> None:
    builder = BatchBuilder(4, "cpu", ALL)
    expect(builder, plan(item(7, 0, [1, 2, 3, 4, 5], TableDelta(0, 0, (9, 3, 8)), is_new=True)), {7: [[9, 3, 8]]}, 4)
    expect(builder, plan(item(7, 5, [6])), {7: [[9, 3, 8]]}, 4)
    # Copy-on-write of the block about to be written, and one more for lookahead.
    expect(builder, plan(item(7, 6, [6], TableDelta(0, 1, (5, 8, 2)))), {7: [[9, 5, 8, 2]]}, 4)
    # Truncation, then growth over what was cut.
    expect(builder, plan(item(7, 6, [6], TableDelta(0, 2, ()))), {7: [[9, 5]]}, 4)
    expect(builder, plan(item(7, 7, [6, 7], TableDelta(0, 2, (4,)))), {7: [[9, 5, 4]]}, 4)


def test_null_blocks_where_a_window_has_passed() -> None:
    builder = BatchBuilder(4, "cpu", KEPT[:2])
    first = item(7, 0, [1] * 9, TableDelta(0, 0, (9, 3, 8)), TableDelta(1, 0, (5, 2, 6)), is_new=True)
    expect(builder, plan(first), {7: [[9, 3, 8], [5, 2, 6]]}, 4)
    passed = item(7, 9, [1] * 4, TableDelta(0, 3, (4,)), TableDelta(1, 0, (0, 2, 6, 1)))
    expect(builder, plan(passed), {7: [[9, 3, 8, 4], [0, 2, 6, 1]]}, 4)
    expect(builder, plan(item(7, 13, [1], TableDelta(1, 1, (0, 6, 1)))), {7: [[9, 3, 8, 4], [0, 0, 6, 1]]}, 4)


def test_a_group_says_how_far_back_its_rows_see() -> None:
    first = item(7, 0, [1] * 13, *(TableDelta(idx, 0, (9, 3, 8, 4)) for idx in range(3)), is_new=True)
    seen = []
    for attention in BatchBuilder(4, "cpu", (*KEPT[:2], CHUNKED)).build(plan(first)).groups:
        assert isinstance(attention, AttentionBatch)
        seen.append([attention.first_seen(position) for position in (0, 5, 6, 7, 12)])
    assert seen == [[0, 0, 0, 0, 0], [0, 0, 0, 1, 6], [0, 0, 6, 6, 12]]


def test_a_state_is_the_last_entry_wherever_the_tokens_end() -> None:
    """It is carried along to where the slots end, and drafts are computed one after the other."""
    builder = BatchBuilder(4, "cpu", KEPT[2:])
    (batch,) = builder.build(plan(item(7, 0, [1] * 5, TableDelta(0, 0, (0, 3)), is_new=True))).groups
    assert batch == StateBatch([3], [0, 5], [False])
    (batch,) = builder.build(plan(item(7, 5, [1] * 2, TableDelta(0, 1, (0, 8))))).groups
    assert batch == StateBatch([8], [0, 2], [True])
    (batch,) = builder.lay_out([item(7, 7, [1])]).groups
    assert batch == StateBatch([8], [0, 1], [True])


def test_a_batch_for_some_groups_is_that_part_of_a_whole_one() -> None:
    builder = BatchBuilder(4, "cpu", KEPT)
    deltas = [TableDelta(idx, 0, (idx + 5, idx + 9)) for idx in range(3)]
    step = plan(item(7, 0, [1] * 6, *deltas, is_new=True))
    whole = builder.build(step)
    part = builder.lay_out(step.items, range(1, 3))
    assert [type(group) for group in part.groups] == [AttentionBatch, StateBatch]
    assert part.groups[0].block_ids.tolist() == whole.groups[1].block_ids.tolist() == [6, 10]
    assert part.groups[1] == whole.groups[2]
    assert part.input_ids.tolist() == whole.input_ids.tolist()


def test_a_sequence_that_was_closed_starts_over() -> None:
    builder = BatchBuilder(4, "cpu", ALL)
    builder.build(plan(item(7, 0, [1], TableDelta(0, 0, (9, 3)), is_new=True)))
    reopened = item(7, 4, [5], TableDelta(0, 0, (2, 6)), is_new=True)
    expect(builder, plan(reopened, finished_ids=(7, 99)), {7: [[2, 6]]}, 4)
    builder.build(plan(finished_ids=(7,)))
    with pytest.raises(KeyError):
        builder.build(plan(item(7, 5, [6])))


def test_a_plan_without_items_is_an_empty_batch() -> None:
    batch = BatchBuilder(4, "cpu", KEPT[:2]).build(plan())
    assert batch.row_starts == [0]
    assert batch.input_ids.tolist() == batch.positions.tolist() == []
    assert [attention.block_ids.tolist() for attention in batch.groups] == [[], []]


def test_a_table_too_short_is_noticed() -> None:
    builder = BatchBuilder(4, "cpu", ALL)
    with pytest.raises(AssertionError, match="table of 1 blocks"):
        builder.build(plan(item(7, 0, [1] * 5, TableDelta(0, 0, (9,)), is_new=True)))
    builder.build(plan(item(8, 0, [1] * 5, TableDelta(0, 0, (2, 3)), is_new=True)))
    with pytest.raises(AssertionError, match="table of 1 blocks"):  # what was cut is gone
        builder.build(plan(item(8, 4, [1], TableDelta(0, 1, ()))))
    with pytest.raises(AssertionError, match="cannot change from 3 on"):
        builder.build(plan(item(7, 0, [1], TableDelta(0, 3, (9,)))))


@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_long_random_histories(seed: int, block_size: int, num_groups: int) -> None:
    """Sequences open, grow, are cut, get blocks replaced and close, in every mix."""
    rng = random.Random(seed)
    builder = BatchBuilder(block_size, "cpu", KEPT[:num_groups])
    tables: dict[int, list[list[int]]] = {}
    lengths: dict[int, int] = {}
    for _ in range(60):
        finished_ids = tuple(seq_id for seq_id in tables if rng.random() < 0.05)
        for seq_id in finished_ids:
            del tables[seq_id], lengths[seq_id]
        items = []
        for seq_id in rng.sample(range(8), rng.randint(1, 6)):
            is_new = seq_id not in tables
            if is_new:
                tables[seq_id] = [[] for _ in range(num_groups)]
                lengths[seq_id] = rng.choice([0, 0, 3])
            start = lengths[seq_id] = max(0, lengths[seq_id] - rng.choice([0, 0, 0, 2]))
            count = rng.choice([1, 1, 1, 2, 9, 40])
            lengths[seq_id] += count
            needed = -(-lengths[seq_id] // block_size)
            deltas = []
            for group_idx, table in enumerate(tables[seq_id]):
                keep = rng.choice([len(table), len(table), rng.randint(0, len(table))])
                new = [rng.randrange(1, 1000) for _ in range(max(0, needed - keep) + rng.choice([0, 0, 1]))]
                if new or keep < len(table):
                    deltas.append(TableDelta(group_idx, keep, tuple(new)))
                table[keep:] = new
            items.append(item(seq_id, start, rng.choices(range(50), k=count), *deltas, is_new=is_new))
        expect(builder, plan(*items, finished_ids=finished_ids), tables, block_size)


def test_ends_are_laid_out_as_if_they_were_all() -> None:
    """The same rows of the same tables, where the items' last tokens are the only ones of the step."""
    builder = BatchBuilder(4, "cpu", KEPT)
    tables = [TableDelta(group_idx, 0, (9, 3, 8, 5)) for group_idx in range(3)]
    others = [TableDelta(group_idx, 0, (1, 2, 4)) for group_idx in range(3)]
    items = [item(7, 4, [1, 2, 3, 4, 5, 6], *tables, is_new=True), item(8, 0, [7, 8, 9], *others, is_new=True)]
    builder.apply_plan(plan(*items))
    for counts, rows, ends in [
        ([1, 2], [5, 7, 8], [item(7, 9, [6]), item(8, 1, [8, 9])]),
        ([0, 3], [6, 7, 8], [item(8, 0, [7, 8, 9])]),
        ([6, 0], [0, 1, 2, 3, 4, 5], [item(7, 4, [1, 2, 3, 4, 5, 6])]),
        ([0, 0], [], []),
    ]:
        found, expected = builder.lay_out_ends(items, counts), builder.lay_out(ends)
        assert found is not None
        assert found.rows.tolist() == end_rows(items, counts) == rows
        assert found.positions.tolist() == expected.positions.tolist()
        for group, wanted in zip(found.groups, expected.groups, strict=True):
            assert plain(group) == plain(wanted)
    assert builder.lay_out_ends(items, [6, 3]) is None


def plain(group: AttentionBatch | StateBatch) -> dict[str, Any]:
    fields = {name: getattr(group, name) for name in group.__dataclass_fields__}
    return {name: each.tolist() if isinstance(each, torch.Tensor) else each for name, each in fields.items()}
