"""The suffix automaton against a search through all texts."""

from __future__ import annotations

import random
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sequences.decoding.automaton import END, ROOT, SuffixAutomaton

texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), max_size=6)


def longest_end(texts: list[list[int]], query: list[int]) -> int:
    """Return the length of the longest end of a query that is part of some text; the slow twin."""
    for length in range(len(query), 0, -1):
        end = query[len(query) - length :]
        if any(text[i : i + length] == end for text in texts for i in range(len(text))):
            return length
    return 0


def continuations(texts: list[list[int]], part: list[int], limit: int) -> list[list[int]]:
    """Return the continuations of a part, up to a length."""
    return [
        text[i + len(part) : i + len(part) + limit]
        for text in texts
        for i in range(len(text) - len(part) + 1)
        if text[i : i + len(part)] == part
    ]


@settings(max_examples=400)
@given(texts=texts, query=st.lists(st.integers(0, 2), max_size=20), limit=st.integers(1, 5))
def test_matches_and_continuations_are_those_of_the_texts(texts: list[list[int]], query: list[int], limit: int) -> None:
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.add(text)
    state, length = ROOT, 0
    for end, token in enumerate(query, 1):
        state, length = automaton.advance(state, length, token)
        assert length == longest_end(texts, query[:end])
        if length:
            part = query[end - length : end]
            assert automaton.continuation(state, limit) in continuations(texts, part, limit)


@settings(max_examples=400)
@given(texts=texts, query=st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_a_match_goes_on_while_texts_are_added(texts: list[list[int]], query: list[int]) -> None:
    automaton = SuffixAutomaton()
    state, length = ROOT, 0
    for end, token in enumerate(query, 1):
        before = length
        if end <= len(texts):
            automaton.add(texts[end - 1])
        state, length = automaton.advance(state, length, token)
        known = texts[:end]
        # What was added since may have made the end before longer; what is found is a match all the same.
        assert longest_end(known, query[end - before - 1 : end]) == length
        part = query[end - length : end]
        assert not length or automaton.continuation(state, 3) in continuations(known, part, 3)


def test_a_text_goes_on_as_it_did_last() -> None:
    automaton = SuffixAutomaton()
    automaton.add([1, 2, 3, 4])
    automaton.add([1, 2, 3, 5, 6])
    state, length = ROOT, 0
    for token in (1, 2, 3):
        state, length = automaton.advance(state, length, token)
    assert automaton.continuation(state, 4) == [5, 6]
    assert END not in automaton.continuation(state, 4)


def test_states_and_bytes_are_bounded() -> None:
    rng = random.Random(0)
    for vocab_size in (2, 50, 30_000):
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        automaton = SuffixAutomaton()
        for _ in range(40):
            automaton.add([rng.randrange(vocab_size) for _ in range(500)])
        taken = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert len(automaton._lengths) <= 2 * automaton.num_tokens
        assert 0.5 * taken < automaton.num_bytes < 2.5 * taken, vocab_size
