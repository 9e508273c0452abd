"""Slots of the waiting queue, and the estimate after which a refused client should retry."""

from __future__ import annotations

import pytest

from quire.engine.queue_slots import LONGEST_RETRY_S, DepartureRate, QueueSlots
from quire.errors import InvalidParameter, QueueFull


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def measured(interval_s: float, num: int = 100) -> tuple[DepartureRate, Clock]:
    """Return the measure of a server that finishes a request every `interval_s` seconds."""
    clock = Clock()
    departures = DepartureRate(clock)
    for _ in range(num):
        departures.note(num_waiting=5)
        clock.now_s += interval_s
    departures.note(num_waiting=5)
    return departures, clock


@pytest.mark.parametrize(
    ("interval_s", "num_waiting", "expected"),
    [(0.5, 10, 5), (0.5, 11, 6), (0.001, 128, 1), (0.1, 128, 13), (2.0, 128, LONGEST_RETRY_S), (0.5, 0, 1)],
)
def test_the_wait_is_what_the_queue_takes_to_empty(interval_s: float, num_waiting: int, expected: int) -> None:
    departures, _ = measured(interval_s)
    assert departures.wait_s(num_waiting) == expected


def test_nothing_is_told_before_anything_was_measured() -> None:
    departures = DepartureRate(Clock())
    assert departures.wait_s(1000) == 1
    departures.note(0)
    assert departures.wait_s(1000) == 1


def test_a_time_in_which_nobody_waited_says_nothing() -> None:
    departures, clock = measured(0.5)
    departures.note(num_waiting=0)
    clock.now_s += 3600
    departures.note(num_waiting=3)
    assert departures.wait_s(10) == 5


def test_the_retry_estimate_grows_before_the_next_departure() -> None:
    departures, clock = measured(0.5)
    clock.now_s += 4
    assert departures.wait_s(10) == 40


def test_it_follows_a_change_of_pace() -> None:
    departures, clock = measured(1.0)
    for _ in range(100):
        clock.now_s += 0.1
        departures.note(num_waiting=5)
    assert departures.wait_s(20) == 3  # 0.1 s each, and what is left of the seconds before


def test_a_full_queue_says_when_to_come_back() -> None:
    clock, num_queued = Clock(), 4
    places = QueueSlots(5, lambda: num_queued, clock)
    for _ in range(50):
        places.end()
        clock.now_s += 2
    places.check()
    with places.reserve(1) as place:
        with pytest.raises(QueueFull) as refusal:
            places.check()
        assert refusal.value.retry_after_s == 10
        with pytest.raises(QueueFull):
            places.reserve(1)
        place.take()
        places.put()
        with pytest.raises(QueueFull):
            places.check()
        places.start()
    places.check()


def test_what_could_never_be_let_in_is_no_matter_of_waiting() -> None:
    places = QueueSlots(5, lambda: 0)
    with pytest.raises(
        InvalidParameter,
        match=r"prompt must be at most 5 prompts, as many as may wait \(max_queue_len\), got '6 prompts'",
    ):
        places.reserve(6)
    with places.reserve(5), pytest.raises(QueueFull):
        places.check()
    QueueSlots(None, lambda: 10**6).reserve(10**6)
