"""Drafts from earlier outputs: their namespaces, their lifetime, and their tokens."""

from __future__ import annotations

import random

from quire.memory.prefix.token_chain import Namespace
from quire.sequences.decoding.automaton import ROOT
from quire.sequences.decoding.suffixes import REACH, OutputHistory, SuffixDrafter
from tests.decoding.sequences import sequence_of

SAID = [5, 9, 2, 7, 1, 8, 3, 6, 4]


def test_an_output_is_guessed_to_come_again() -> None:
    drafter = SuffixDrafter(2, 1 << 20)
    drafter.forget(sequence_of(0, [0, 0], SAID))
    again = sequence_of(1, [10, 11], [5, 9])
    assert list(drafter.propose(again, 4)) == [2, 7, 1, 8]
    again.tokens += [2, 7, 1]
    assert list(drafter.propose(again, 9)) == [8, 3, 6, 4]
    again.tokens += [99]
    assert list(drafter.propose(again, 4)) == []


def test_the_longer_match_wins_in_prompt_or_earlier_outputs() -> None:
    drafter = SuffixDrafter(2, 1 << 20)
    drafter.forget(sequence_of(0, [0, 0], SAID))
    assert list(drafter.propose(sequence_of(1, [9, 2, 30, 31], [5, 9, 2]), 2)) == [7, 1]
    assert list(drafter.propose(sequence_of(2, [6, 5, 9, 2, 30, 31], [6, 5, 9, 2]), 2)) == [30, 31]


def test_nothing_leaks_from_one_namespace_into_another() -> None:
    drafter = SuffixDrafter(2, 1 << 20)
    drafter.forget(sequence_of(0, [0], SAID, tenant="a"))
    drafter.forget(sequence_of(1, [0], [5, 9, 40, 41], tenant="b"))
    for tenant, expected in (("a", [2, 7]), ("b", [40, 41]), ("c", []), (None, [])):
        assert list(drafter.propose(sequence_of(2, [0], [5, 9], tenant=tenant), 2)) == expected
        drafter.forget(sequence_of(2, [0], [], tenant=tenant))


def test_a_reset_forgets_earlier_outputs_and_not_the_sequence_itself() -> None:
    drafter = SuffixDrafter(2, 1 << 20)
    drafter.forget(sequence_of(0, [0], SAID))
    live = sequence_of(1, [0], [5, 9])
    assert list(drafter.propose(live, 1)) == [2]
    drafter.reset()
    live.tokens += [2]
    assert list(drafter.propose(live, 1)) == []
    live.tokens += [7, 5, 9]
    assert list(drafter.propose(live, 1)) == [2]
    drafter.forget(sequence_of(2, [0], [5, 9, 60, 61]))
    assert list(drafter.propose(sequence_of(3, [0], [9, 60]), 1)) == [61]


def test_a_sequence_not_drafted_for_long_is_matched_by_its_end() -> None:
    drafter = SuffixDrafter(2, 1 << 20)
    drafter.forget(sequence_of(0, [0], SAID))
    live = sequence_of(1, [0], [5, 9])
    drafter.propose(live, 1)
    live.tokens += [50 + i for i in range(3 * REACH)]
    live.tokens += [7, 1]
    assert list(drafter.propose(live, 2)) == [8, 3]


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    rng, limit = random.Random(0), 400_000
    archive = OutputHistory(limit)
    names = [Namespace("model", cache_salt=str(i)) for i in range(3)]
    for i in range(300):
        archive.add(names[i % 2 if i < 200 else 2], [rng.randrange(1000) for _ in range(60)])
        assert archive.num_bytes <= limit
        segments = [volume for name in names for _, volume in archive.segments(name)]
        assert archive.num_bytes == sum(volume.num_bytes for volume in segments)
    assert archive.num_bytes > limit // 2
    assert not archive.segments(names[0])
    assert not archive.segments(names[1])
    assert 2 <= len(list(archive.segments(names[2]))) <= 6
    archive.clear()
    assert (archive.num_bytes, archive.segments(names[2])) == (0, [])


def test_a_long_output_keeps_its_end_and_evicts_no_other() -> None:
    archive = OutputHistory(1 << 16)
    mine, other = Namespace("mine"), Namespace("other")
    archive.add(other, list(range(10)))
    archive.add(mine, list(range(5000)))
    ((_, volume),) = archive.segments(mine)
    assert volume.continuation(volume.advance(ROOT, 0, 4997)[0], 9) == [4998, 4999]
    assert volume.advance(ROOT, 0, 100) == (ROOT, 0)
    assert archive.segments(other)
