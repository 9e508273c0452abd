"""Breakers, the ejection of servers that stand out by their failures, and the budget of retries."""

from __future__ import annotations

import random

import pytest

from quire.fleet.routing.breaker import Breaker, BreakerState
from quire.fleet.routing.ejection import WINDOW_S, Ejector
from quire.fleet.routing.failure_policy import FailurePolicy
from quire.fleet.routing.retry_budget import RetryBudget

NAMES = ("a", "b", "c", "d")
CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


def ejector_of(names: tuple[str, ...] = NAMES, **fields: float) -> Ejector:
    ejector = Ejector(FailurePolicy(**fields))  # type: ignore[arg-type]
    for name in names:
        ejector.add(name)
    return ejector


def fail(ejector: Ejector, name: str, now_s: float, count: int = 1) -> list[bool]:
    others = [other for other in ejector.breakers if other != name]
    return [ejector.fail(name, others, now_s) for _ in range(count)]


def test_an_open_breaker_takes_one_trial_after_its_time_whose_failure_doubles_it() -> None:
    breaker = Breaker(3, 1.0, 30.0)
    assert [breaker.fail(0.0) for _ in range(3)] == [False, False, True]
    now_s, expected_s = 0.0, 1.0
    breaker.open(now_s)
    for _ in range(8):
        assert breaker.state(now_s + expected_s - 0.01) is OPEN
        assert not breaker.allows(now_s + expected_s - 0.01)
        now_s += expected_s
        assert breaker.state(now_s) is HALF_OPEN
        assert breaker.allows(now_s)
        assert breaker.begin(now_s)
        assert not breaker.allows(now_s)
        assert not breaker.begin(now_s)
        breaker.fail(now_s, is_trial=True)
        expected_s = min(2 * expected_s, 30.0)
    now_s += 30.0
    assert breaker.begin(now_s)
    breaker.succeed(now_s, is_trial=True)
    assert breaker.state(now_s) is CLOSED
    assert breaker.num_opened == 9


def test_a_trial_without_a_result_is_followed_by_another() -> None:
    breaker = Breaker(1, 1.0, 30.0)
    breaker.open(0.0)
    assert breaker.begin(1.0)
    breaker.end_trial()
    assert breaker.begin(1.0)


def test_requests_from_before_an_opening_change_nothing() -> None:
    breaker = Breaker(2, 1.0, 30.0)
    breaker.open(0.0)
    assert not breaker.fail(0.5)
    breaker.succeed(0.5)
    assert breaker.state(0.99) is OPEN
    assert breaker.state(1.0) is HALF_OPEN


def test_a_breaker_forgets_its_doublings_while_it_is_closed() -> None:
    breaker = Breaker(1, 1.0, 30.0)
    now_s = 0.0
    for _ in range(4):
        breaker.open(now_s)
        now_s += 30.0
    assert breaker.begin(now_s)
    breaker.succeed(now_s, is_trial=True)
    now_s += 61.0
    breaker.open(now_s)  # the fifth time: 2 of 4 doublings are forgotten
    assert breaker.state(now_s + 3.99) is OPEN
    assert breaker.state(now_s + 4.0) is HALF_OPEN


def test_a_success_between_failures_counts_and_the_rate_decides() -> None:
    ejector, ejected = ejector_of(), []
    for number in range(10):
        ejected += fail(ejector, "a", number * 0.1, 2)
        ejector.succeed("a", number * 0.1)
    # Never three in a row, but two thirds of the first ten.
    assert ejected.index(True) in (6, 7)


def test_failures_of_another_time_do_not_count() -> None:
    ejector = ejector_of()
    for number in range(30):
        assert fail(ejector, "a", number * 2 * WINDOW_S) == [False]
        ejector.succeed("a", number * 2 * WINDOW_S)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.2, 1), (0.5, 2), (0.75, 3), (1.0, 3)])
def test_a_share_of_the_servers_is_ejected_at_most(share: float, expected: int) -> None:
    """The last one never is. The others have answered before, so each of them stands out."""
    ejector = ejector_of(max_ejected=share)
    for name in NAMES:
        for _ in range(100):
            ejector.succeed(name, 0.0)
    for name in NAMES:
        fail(ejector, name, 0.0, 5)
    states = [ejector.breakers[name].state(0.0) for name in NAMES]
    assert states.count(OPEN) == expected


def test_one_server_alone_is_never_ejected() -> None:
    ejector = ejector_of(("a",))
    assert not any(fail(ejector, "a", 0.0, 50))


def test_servers_that_fail_alike_are_not_ejected() -> None:
    rng, ejector = random.Random(0), ejector_of()
    now_s, ejected = 0.0, 0
    for _ in range(4000):
        now_s += 0.01
        name = rng.choice(NAMES)
        if rng.random() < 0.6:
            ejected += fail(ejector, name, now_s)[0]
        else:
            ejector.succeed(name, now_s)
    assert ejected <= 1  # by the first ones, when nothing is known of the others


def test_a_budget_allows_a_share_and_a_number_per_second() -> None:
    budget = RetryBudget(0.2, 1.0)
    now_s, num_allowed = 50.0, 0
    for _ in range(3000):
        now_s += 0.01
        budget.add_request(now_s)
        num_allowed += budget.take(1, now_s)
    # 30 s: a fifth of 3,000 requests, and one per second. At the start, what a whole window allows is there at once.
    assert 0.2 * 3000 <= num_allowed <= 0.2 * 3000 + 1.5 * 30 + WINDOW_S
    assert budget.num_refused == 3000 - num_allowed


def test_a_budget_without_requests_and_minimum_allows_none() -> None:
    budget = RetryBudget(0.2, 0.0)
    assert not budget.take(1, 0.0)
    assert budget.take(5, 0.0)
    assert not budget.take(5, 0.0)
