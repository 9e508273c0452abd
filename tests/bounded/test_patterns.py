"""Patterns of untrusted files match as Python's do, and end."""

from __future__ import annotations

import pytest

from quire.platform.bounded.patterns import match_names


def test_patterns_match_at_the_start_of_names() -> None:
    found = match_names(["a.*b", "b", "a"], ["ab", "ba", "xab"])
    assert found == {"a.*b": {"ab"}, "b": {"ba"}, "a": {"ab"}}


def test_no_patterns_match_nothing() -> None:
    assert match_names([], ["a"]) == {}


def test_an_invalid_pattern_is_named() -> None:
    with pytest.raises(ValueError, match=r"'\(a' is not a valid regular expression"):
        match_names(["a", "(a"], ["a"])


def test_a_pattern_of_exponential_time_is_stopped() -> None:
    with pytest.raises(ValueError, match=r"'\(a\+\)\+b' exceeds the limit of time"):
        match_names(["a", "(a+)+b"], ["a" * 64], timeout_s=0.2)


def test_the_limit_is_of_all_patterns_together() -> None:
    patterns = [f"a{{{count}}}" for count in range(1, 1000)]
    with pytest.raises(ValueError, match="exceeds the limit of time"):
        match_names(patterns, ["a" * 1000] * 1000, timeout_s=0.05)
