"""How fast replicas are: measured, assumed where nothing is known, forgotten; and policies that ask for nothing."""

from __future__ import annotations

import random

import pytest

from quire.errors import ConfigError
from quire.fleet.routing.loads import HALF_LIFE_S, ReplicaLoad, Speed
from quire.fleet.routing.router import Router, RouterConfig, RouteRequest

NAMES = ("a", "b", "c", "d")


def router_of(policy: str = "cache_aware") -> Router:
    router = Router(RouterConfig(policy=policy, seconds_per_token=0.001))
    for name in NAMES:
        router.add_replica(name, 16)
    return router


def serve(router: Router, rng: random.Random, num_requests: int, slow: dict[str, float], start_s: float) -> list[str]:
    """Route prompts that no cache has, one after the other, and return where they went.

    A token takes a fifth of the time that is assumed at first, and a request 10 ms beside its tokens.
    """
    chosen: list[str] = []
    for number in range(num_requests):
        now_s = start_s + number
        num_tokens = rng.randrange(50, 400)
        route = router.route(RouteRequest([rng.randrange(1 << 30) for _ in range(num_tokens)]), now_s)
        assert route is not None
        seconds = slow.get(route.replica, 1.0) * (0.01 + 0.0002 * num_tokens) * rng.uniform(0.7, 1.3)
        router.on_first_token(route, now_s + seconds)
        router.end(route)
        chosen.append(route.replica)
    return chosen


def test_replicas_that_were_not_measured_are_as_fast_as_those_that_were() -> None:
    chosen = serve(router_of(), random.Random(1), 400, {}, 0.0)
    assert all(chosen[100:].count(name) >= 30 for name in NAMES)


def test_a_slow_replica_gets_less_and_is_tried_again_later() -> None:
    router, rng = router_of(), random.Random(2)
    chosen = serve(router, rng, 400, {"b": 3.0}, 0.0)
    assert 0 < chosen[200:].count("b") < 35
    # It is as fast as the others again: what was measured is forgotten, and new measurements say so.
    later = serve(router, rng, 400, {}, 400 + 4 * HALF_LIFE_S)
    assert later.count("b") > 60


def test_the_line_through_measurements_is_found() -> None:
    speed, rng = Speed(0.001), random.Random(3)
    for _ in range(500):
        num_tokens = rng.randrange(10, 600)
        speed.measure(0.02 + 0.0003 * num_tokens, num_tokens)
    assert speed.seconds_per_token == pytest.approx(0.0003, rel=0.02)
    assert speed.overhead_s == pytest.approx(0.02, rel=0.05)


def test_requests_of_one_length_have_no_overhead_and_one_slow_start_says_little() -> None:
    speed = Speed(0.001)
    for _ in range(200):
        speed.measure(0.1, 200)
    assert (speed.seconds_per_token, speed.overhead_s) == (pytest.approx(0.0005), pytest.approx(0.0))
    speed.measure(1000.0, 200)
    assert speed.seconds_per_token < 0.0006


def test_what_is_known_of_a_replica_is_forgotten_by_halves() -> None:
    load = ReplicaLoad()
    for _ in range(500):
        load.measure(0.3, 0.1, 10.0)
    assert load.slowness_at(10.0) == pytest.approx(3.0, rel=0.01)
    assert load.slowness_at(10.0 + HALF_LIFE_S) == pytest.approx(2.0, rel=0.01)
    assert load.slowness_at(1e9) == pytest.approx(1.0)


def test_requests_go_in_turns_whatever_their_prompts_are() -> None:
    router = router_of("round_robin")
    router.set_available("c", False)
    request = RouteRequest(list(range(100)))
    found = [router.route(request, 0.0) for _ in range(5)]
    assert [route.replica for route in found if route] == ["a", "b", "d", "a", "b"]
    ranked = router.rank(request, 0.0, excluded=["d"])
    assert [route.replica for route in ranked] == ["a", "b"]


def test_requests_go_to_the_shortest_queue() -> None:
    router = router_of("least_loaded")
    for num_tokens, replica in ((400, "a"), (300, "b"), (200, "c"), (100, "d"), (250, "d"), (50, "c")):
        route = router.route(RouteRequest([7] * num_tokens), 0.0)
        assert route is not None
        assert route.replica == replica


def test_a_policy_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy must be one of cache_aware, least_loaded, round_robin, got 'rr'"):
        RouterConfig(policy="rr")
