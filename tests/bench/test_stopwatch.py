"""A stopwatch is in one phase at a time, so that phases sum to the whole."""

from __future__ import annotations

from itertools import count

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.measurement.bench.stopwatch import HEAD, Stopwatch, Timed, in_order


def test_steps_are_timed_one_after_the_other() -> None:
    config = EngineConfig.from_options(max_num_seqs=7)
    assert in_order(config) == EngineConfig.from_options(max_num_seqs=7, async_scheduling=False)
    with pytest.raises(ConfigError, match="got True") as caught:
        in_order(EngineConfig.from_options(async_scheduling=True))
    assert caught.value.field == "async_scheduling"


def test_a_phase_within_another_is_taken_from_it() -> None:
    watch = Stopwatch(map(float, count()).__next__)
    inner = watch.timed("inner", lambda: "result")
    outer = watch.timed("outer", lambda: [inner(), inner()])
    assert outer() == ["result", "result"]
    # Readings 0 to 5: in and out of outer, and of inner twice.
    assert watch.seconds == {"outer": 3.0, "inner": 2.0}
    inner()
    assert watch.seconds == {"outer": 3.0, "inner": 3.0}


def test_a_phase_can_be_followed_by_another_one() -> None:
    watch = Stopwatch(map(float, count()).__next__)
    middle = watch.timed("middle", lambda: None, then="after")
    watch.timed("before", middle)()
    assert watch.seconds == {"before": 1.0, "middle": 1.0, "after": 1.0}


def test_the_parts_of_the_head_count_for_the_head() -> None:
    watch = Stopwatch(map(float, count()).__next__)
    watch.timed(HEAD, watch.timed("linear", lambda: None))()
    assert watch.seconds == {HEAD: 1.0}


def test_an_error_ends_its_phase() -> None:
    watch = Stopwatch(map(float, count()).__next__)
    with pytest.raises(ZeroDivisionError):
        watch.timed("broken", lambda: 1 / 0)()
    watch.timed("whole", lambda: None)()
    assert watch.seconds == {"broken": 1.0, "whole": 1.0}


def test_attributes_are_set_on_the_inner_part() -> None:
    inner = Stopwatch(float)
    timed = Timed(inner, timed=len)
    timed.seconds = {"set": 1.0}
    assert inner.seconds == {"set": 1.0}
    assert timed.timed("ab") == 2


def test_what_is_not_replaced_is_that_of_the_inner_part() -> None:
    timed = Timed([3, 1, 2], call=lambda text: text * 2, sort=lambda: "sorted")
    assert (timed.index(1), timed.sort(), timed("ab")) == (1, "sorted", "abab")
