"""Prompt lookup against a search through the whole list."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sequences.decoding.lookup import MAX_TRIES, NgramIndex


def longest_match(tokens: list[int], shortest: int, longest: int) -> tuple[int, int]:
    """Return what the index finds, by looking everywhere; the slow twin."""
    best = (0, 0)
    for place in range(shortest, len(tokens)):
        length = 0
        while length < min(place, longest) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= max(shortest, best[1]):
            best = place, length
    return best


@settings(max_examples=300)
@given(
    tokens=st.lists(st.integers(0, 3), max_size=40),
    cuts=st.sets(st.integers(0, 40)),
    shortest=st.integers(1, 4),
    more=st.integers(0, 6),
)
def test_the_longest_match_is_found_however_the_list_grows(
    tokens: list[int], cuts: set[int], shortest: int, more: int
) -> None:
    grown: list[int] = []
    index = NgramIndex(grown, shortest, shortest + more)
    for end in [*sorted(cut for cut in cuts if cut <= len(tokens)), len(tokens)]:
        grown += tokens[len(grown) : end]
        found, expected = index.find(), longest_match(grown, shortest, shortest + more)
        # Of many places only the last few are looked at: as few as those that this list has of one n-gram.
        if sum(grown[i : i + shortest] == grown[-shortest:] for i in range(len(grown))) <= MAX_TRIES:
            assert found == expected
        else:
            assert found[1] <= expected[1]


def test_many_tokens_are_indexed_in_little_memory() -> None:
    tokens = [(i * i) % 7919 for i in range(50_000)]
    index = NgramIndex(tokens, 2, 8)
    assert index.find() == longest_match(tokens, 2, 8)
    tokens += tokens[1000:1004]
    assert index.find() == (1004 + 7919 * ((50_000 - 1004) // 7919), 4)


def test_what_ends_within_the_draft_is_taken_to_repeat_itself() -> None:
    index = NgramIndex([1, 2, 3, 1, 2, 3, 1, 2], 2, 4)
    assert index.find() == (5, 4)
    assert index.continuation(5, 7) == [3, 1, 2, 3, 1, 2, 3]
    assert NgramIndex([7, 7, 7], 1, 4).continuation(2, 3) == [7, 7, 7]
