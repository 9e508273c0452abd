"""What decodes share, remembered from step to step, against what is found afresh; this needs no Triton."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.execution.step.batch import BlockTable
from quire.ops.cpu.native_step_work import StepWorkKernels
from quire.ops.triton.attention.decode_sharing import SharedDecodes
from quire.ops.triton.attention.shared_prefixes import PrefixCandidate, SharingRule, find_shared
from quire.ops.triton.attention.shared_work import Sharing
from quire.ops.triton.attention.step_numbers import step_kernels
from quire.ops.triton.tiles import decode_tile, shared_tile
from quire.scheduling.plan import TableDelta

BLOCK_SIZE, GROUP, KV_HEADS, PROCESSORS = 16, 4, 2, 3
WINDOW = 900
pytestmark = pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(None, id="operators"),
        pytest.param(
            step_kernels(), id="compiled", marks=pytest.mark.skipif(not step_kernels(), reason="not compiled")
        ),
    ],
)
# Blocks of a history: so few that tables which were different become alike.
NUM_BLOCKS = 6


def rule_of(least_bytes: float = 0.0) -> SharingRule:
    """Return the rule of bfloat16 and heads of 128: ranges of 256 tokens, in units of 64."""
    tile, decode = shared_tile(128, GROUP, 2, (9, 0)), decode_tile(128, GROUP, 2)
    return SharingRule.of(tile, decode, GROUP, BLOCK_SIZE, 512, 128, least_bytes)


class History:
    """Sequences that decode, and what is remembered of them.

    Args:
        window: tokens that a row sees; None for all.
        rule: rule by which reading once pays.
        kernels: compiled code; None for the slow twin.
    """

    def __init__(
        self, window: int | None = None, rule: SharingRule | None = None, kernels: StepWorkKernels | None = None
    ) -> None:
        self.tables: list[BlockTable] = []
        self.positions: list[int] = []
        self._window, self._rule = window, rule or rule_of()
        self.shared = SharedDecodes(self._rule, KV_HEADS, PROCESSORS, kernels)

    def join(self, table: Sequence[int], position: int) -> None:
        """Add a sequence whose next token has a position in the last block of its table."""
        assert position // BLOCK_SIZE + 1 == len(table)
        self.tables.append(BlockTable())
        self.change(-1, 0, table)
        self.positions.append(position)

    def change(self, seq: int, start: int, blocks: Sequence[int]) -> None:
        """Set what a table has from an entry on."""
        self.tables[seq].change(TableDelta(0, start, tuple(blocks)))

    def replace(self, seq: int, idx: int, block: int) -> None:
        """Set an entry of a table."""
        self.change(seq, idx, (block, *self.tables[seq].ids[idx + 1 :]))

    def leave(self, seq: int) -> None:
        """Take a sequence away."""
        del self.tables[seq], self.positions[seq]

    def append(self, seq: int, count: int, block: int) -> None:
        """Add tokens to a sequence, in the same new block over and over."""
        self.positions[seq] += count
        ids = self.tables[seq].ids
        self.change(seq, len(ids), [block] * (self.positions[seq] // BLOCK_SIZE + 1 - len(ids)))

    def cut(self, seq: int, position: int) -> None:
        """Take a sequence back to a position, as where it was preempted and computed in part."""
        self.positions[seq] = min(self.positions[seq], position)
        self.change(seq, self.positions[seq] // BLOCK_SIZE + 1, ())

    def stamps(self) -> list[int]:
        """Return the stamp of each table."""
        return [table.stamp for table in self.tables]

    def step(self) -> None:
        """Find what the next step shares, and compare it with what is found afresh."""
        tables = [table.ids for table in self.tables]
        starts = list(accumulate(map(len, tables), initial=0))[:-1]
        ids = torch.tensor([block for table in tables for block in table] + [0])
        positions, block_starts = torch.tensor(self.positions), torch.tensor(starts)
        firsts = torch.zeros_like(positions)
        if self._window is not None:
            firsts = (positions + 1 - self._window).clamp(min=0)
        candidates = [
            PrefixCandidate(row, 1, start, position)
            for row, (start, position) in enumerate(zip(starts, self.positions, strict=True))
            if firsts[row] == 0
        ]
        expected = find_shared(candidates, ids, self._rule).ranges
        assert self.shared.find(positions, firsts, ids, block_starts, self.stamps()) == bool(expected)
        sharing, found = Sharing.of(expected, self._rule, KV_HEADS, PROCESSORS), self.shared.sharing
        assert dict(zip(found.rows.tolist(), found.ends.tolist(), strict=True)) == sharing.ends
        assert dict(zip(found.rows.tolist(), found.num_parts.tolist(), strict=True)) == sharing.num_parts
        # Places that tell rows from one another.
        places = torch.arange(len(starts)) * 1000 + 7
        work = sharing.work(dict(enumerate(places.tolist())))
        items, members = found.work(block_starts, places)
        assert items.tolist() == [[*item, 0, 0] for item in work.items]
        assert members.tolist() == [[*row, 0] for row in work.rows]

    def ends(self) -> dict[int, int]:
        """Return the end of the tokens that each row shares."""
        sharing = self.shared.sharing
        return dict(zip(sharing.rows.tolist(), sharing.ends.tolist(), strict=True))


def own(count: int, seq: int) -> list[int]:
    """Return blocks that no other sequence has."""
    return [1000 * (1 + seq) + idx for idx in range(count)]


def two_samples_and_a_stranger(kernels: StepWorkKernels | None) -> History:
    """Return two sequences that share 512 tokens and have 75 of their own, and one with others, after a step."""
    history = History(kernels=kernels)
    history.join([*range(32), *own(5, 0)], 587)
    history.join(own(37, 1), 587)
    history.join([*range(32), *own(5, 2)], 587)
    history.step()
    assert history.ends() == {0: 512, 2: 512}
    return history


blocks = st.integers(0, NUM_BLOCKS - 1)
# Beginnings that many sequences have, which differ early, late, or where the other one ends.
prefixes = st.sampled_from(
    [[0] * 16, [0] * 20, [0] * 32, [0] * 28 + [1] * 4, [0] * 32 + [2] * 20, [1] * 32, [0, *[1] * 24], [0] * 3]
)
numbers = st.integers(0, 1 << 16)
changes = st.one_of(
    st.tuples(st.just("decode"), st.integers(1, 70), blocks),
    st.tuples(st.just("decode"), st.just(1), blocks),
    st.tuples(st.just("join"), prefixes, st.lists(blocks, max_size=12), st.integers(0, 15)),
    st.tuples(st.just("leave"), numbers),
    st.tuples(st.just("append"), numbers, st.integers(1, 130), blocks),
    st.tuples(st.just("replace"), numbers, numbers, blocks),
    st.tuples(st.just("copy"), numbers, numbers, numbers),
    st.tuples(st.just("cut"), numbers, st.integers(0, 700)),
    st.tuples(st.just("swap"), numbers, numbers),
)


def change(history: History, kind: str, *args: object) -> None:
    """Change the sequences of a history; numbers that are out of range go round."""
    count = len(history.tables)
    match kind, args:
        case "join", (list() as prefix, list() as rest, int() as offset):
            table = [*prefix, *rest]
            history.join(table, (len(table) - 1) * BLOCK_SIZE + offset)
        case "decode", (int() as number, int() as block):
            for seq in range(count):
                history.append(seq, number, block)
        case _ if not count:
            pass
        case "leave", (int() as seq,):
            history.leave(seq % count)
        case "append", (int() as seq, int() as number, int() as block):
            history.append(seq % count, number, block)
        case "replace", (int() as seq, int() as idx, int() as block):
            history.replace(seq % count, idx % len(history.tables[seq % count].ids), block)
        case "copy", (int() as seq, int() as other, int() as idx):  # one more block that two have in common
            ids, source = history.tables[seq % count].ids, history.tables[other % count].ids
            idx %= min(len(ids), len(source))
            history.replace(seq % count, idx, source[idx])
        case "cut", (int() as seq, int() as position):
            history.cut(seq % count, position)
        case "swap", (int() as seq, int() as other):
            one, two, tables, positions = seq % count, other % count, history.tables, history.positions
            tables[one], tables[two] = tables[two], tables[one]
            positions[one], positions[two] = positions[two], positions[one]
        case _:
            raise ValueError(kind)


def run(history: History, made: Sequence[tuple[object, ...]]) -> None:
    """Let four sequences begin, and compare after each change."""
    for idx in range(4):
        history.join([*[0] * 24, *[1 + idx % 2] * (8 + idx)], (31 + idx) * BLOCK_SIZE + 3 * idx)
    history.step()
    for kind, *args in made:
        change(history, str(kind), *args)
        if history.tables:
            history.step()


@settings(max_examples=20)
@given(made=st.lists(changes, max_size=20), window=st.sampled_from([None, None, WINDOW]))
def test_what_is_remembered_is_what_is_found(
    kernels: StepWorkKernels | None, made: list[tuple[object, ...]], window: int | None
) -> None:
    run(History(window, kernels=kernels), made)


@pytest.mark.slow
@settings(max_examples=2000)
@given(
    made=st.lists(changes, max_size=40),
    window=st.sampled_from([None, WINDOW]),
    least_bytes=st.sampled_from([0.0, 500_000.0]),
)
def test_what_is_remembered_is_what_is_found_in_long_searches(
    kernels: StepWorkKernels | None, made: list[tuple[object, ...]], window: int | None, least_bytes: float
) -> None:
    run(History(window, rule_of(least_bytes), kernels), made)


def test_steps_of_decodes_find_nothing_again(kernels: StepWorkKernels | None) -> None:
    history = two_samples_and_a_stranger(kernels)
    found = history.shared.sharing
    for step in range(200):
        for seq in range(3):
            history.append(seq, 1, 5000 + 1000 * seq + step)
        history.step()
        assert history.shared.sharing is found


def test_tables_that_change_are_looked_at_again(kernels: StepWorkKernels | None) -> None:
    """A shared block that is another one, or was; and one behind the unit that differs, which changes nothing."""
    history = two_samples_and_a_stranger(kernels)
    history.replace(0, 36, 77)
    history.step()
    assert history.ends() == {0: 512, 2: 512}
    history.replace(0, 17, 79)
    history.step()
    assert history.ends() == {0: 256, 2: 256}
    history.replace(2, 17, 79)
    history.step()
    assert history.ends() == {0: 512, 2: 512}


def test_a_table_is_compared_again_when_its_first_unit_beyond_the_others_is_whole(
    kernels: StepWorkKernels | None,
) -> None:
    """Two tables that are alike as far as whole units go: with the next unit they may differ, or go on alike."""
    for is_alike in (True, False):
        history = History(kernels=kernels)
        for seq in range(2):
            history.join([*range(20), 99 if is_alike else 100 + seq], 335)
        history.step()
        assert history.ends() == {0: 320, 1: 320}
        for seq in range(2):
            history.append(seq, 64, 200)
        history.step()
        assert history.ends() == dict.fromkeys((0, 1), 384 if is_alike else 320)


def test_a_stranger_that_begins_as_others_do_joins_them(kernels: StepWorkKernels | None) -> None:
    history = two_samples_and_a_stranger(kernels)
    history.change(1, 0, [*range(32), *own(5, 1)])
    history.step()
    assert history.ends() == {0: 512, 1: 512, 2: 512}


def test_rows_that_no_longer_see_their_beginning(kernels: StepWorkKernels | None) -> None:
    history = History(window=597, kernels=kernels)
    for seq in range(3):
        history.join([*range(32), *own(5, seq)], 587 + 4 * (seq == 2))
    history.step()
    assert history.ends() == {0: 512, 1: 512, 2: 512}
    for seq in range(3):
        history.append(seq, 8, 9000 + seq)
    history.step()
    assert history.ends() == {0: 512, 1: 512}


def test_rows_of_one_sequence_share_its_tokens(kernels: StepWorkKernels | None) -> None:
    """Where drafts are verified; also after a step in which its single row shared nothing, and before another one."""
    history = History(kernels=kernels)
    for seq in range(2):
        history.join(own(39, seq), 620 + seq)
    history.step()
    assert not history.ends()
    for draft in range(1, 4):
        history.tables.append(history.tables[0])
        history.positions.append(620 + draft)
    history.step()
    assert history.ends() == {0: 576, 2: 576, 3: 576, 4: 576}
    for _ in range(3):
        history.leave(2)
    history.step()
    assert not history.ends()
