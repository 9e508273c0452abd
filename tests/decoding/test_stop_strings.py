"""Stop strings: found wherever the text is cut, and never shown in part."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.sequences.decoding import StopStrings

letters = st.text(alphabet="ab", max_size=24)
stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def feed(finder: StopStrings, chunks: list[str]) -> tuple[str, str | None]:
    """Return all that is shown, and the stop string; as a client sees it."""
    shown = ""
    for chunk in chunks:
        text, stop = finder.push(chunk)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + finder.flush(), None


def expected(text: str, strings: list[str], *, is_included: bool) -> tuple[str, str | None]:
    """Find the stop string the slow way: grow the text by a character, and look at its end."""
    for end in range(1, len(text) + 1):
        ending = [string for string in strings if text[:end].endswith(string)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if is_included else end - len(stop)], stop
    return text, None


@given(text=letters, strings=stops, is_included=st.booleans(), cuts=st.lists(st.integers(0, 24)))
def test_the_result_does_not_depend_on_how_the_text_is_cut(
    text: str, strings: list[str], is_included: bool, cuts: list[int]
) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    chunks = [text[start:end] for start, end in pairwise(edges)]
    wanted = expected(text, strings, is_included=is_included)
    for pieces in (chunks, [text], list(text)):
        assert feed(StopStrings(strings, is_included=is_included), pieces) == wanted


@given(text=letters, strings=stops, later=letters)
def test_what_was_shown_never_becomes_part_of_a_stop_string(text: str, strings: list[str], later: str) -> None:
    finder = StopStrings(strings, is_included=False)
    shown, stop = finder.push(text)
    if stop is None:
        whole, _ = expected(text + later, strings, is_included=False)
        assert whole.startswith(shown)


@given(text=letters, strings=stops)
def test_no_more_is_held_back_than_must_be(text: str, strings: list[str]) -> None:
    finder = StopStrings(strings, is_included=False)
    shown, stop = finder.push(text)
    held = finder.flush()
    if stop is None:
        assert shown + held == text
        assert not held or any(string.startswith(held) and string != held for string in strings)
    assert finder.flush() == ""


@pytest.mark.parametrize(
    ("strings", "text", "included", "excluded"),
    [
        (["abc", "b"], "xabc", "xab", "xa"),
        (["b", "ab"], "xab", "xab", "x"),
        (["aa"], "baaa", "baa", "b"),
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo\n\n", "one\ntwo"),
    ],
    ids=["complete first", "longest at one end", "earliest", "lines"],
)
def test_which_stop_string_wins(strings: list[str], text: str, included: str, excluded: str) -> None:
    assert StopStrings(strings, is_included=True).push(text)[0] == included
    assert StopStrings(strings, is_included=False).push(text)[0] == excluded


def test_before_min_tokens_text_passes_and_cannot_be_part_of_a_match() -> None:
    finder = StopStrings(["stop"], is_included=False)
    assert finder.push("a stop, st", can_stop=False) == ("a stop, st", None)
    assert finder.push("op") == ("op", None)
    assert finder.push(" and st") == (" and ", None)
    assert finder.push("o", can_stop=False) == ("sto", None)
    assert finder.push("p") == ("p", None)
    assert finder.push("stop") == ("", "stop")


def test_without_stop_strings_everything_passes() -> None:
    finder = StopStrings((), is_included=False)
    assert finder.push("text") == ("text", None)
    assert finder.flush() == ""
