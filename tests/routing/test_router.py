"""The router: hits against queues, sessions, gaps, determinism, and many replicas."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from quire.fleet.routing.feed import FeedState
from quire.fleet.routing.router import MAX_HOLDERS, MAX_IDLE, Route, Router, RouterConfig, RouteRequest
from quire.fleet.routing.shadow_tree import NO_HIT, Scope
from quire.memory.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, encode

SIZE = 16
PROMPT = list(range(1000))


def router_of(*names: str, **config: float | str) -> Router:
    router = Router(RouterConfig(**{"hit_weight": 1.0, "balance_weight": 0.0, **config}))  # type: ignore[arg-type]
    for name in names:
        router.add_replica(name, SIZE)
    return router


def stored(tokens: Sequence[int], seed: int = 0) -> BlockStored:
    """Return the event for all whole blocks of a prompt."""
    count = len(tokens) // SIZE
    return BlockStored(tuple(range(seed, seed + count)), None, encode(tokens[: count * SIZE]), SIZE, "GPU")


def choose(router: Router, tokens: Sequence[int] = PROMPT, now_s: float = 0.0, **fields: object) -> Route:
    route = router.route(RouteRequest(tokens, **fields), now_s)  # type: ignore[arg-type]
    assert route is not None
    return route


def test_a_request_goes_where_its_prefix_is() -> None:
    router = router_of("a", "b", "c")
    router.apply("b", 0, [stored(PROMPT)])
    route = choose(router)
    assert (route.replica, route.hit.num_tokens) == ("b", 992)
    assert choose(router, PROMPT, scope=Scope(tenant="other")).hit.num_tokens == 0


def test_after_an_eviction_it_goes_elsewhere() -> None:
    router = router_of("a", "b")
    router.apply("a", 0, [stored(PROMPT[:320])])
    router.apply("b", 0, [stored(PROMPT)])
    assert choose(router).replica == "b"
    router.apply("b", 1, [BlockRemoved(tuple(range(62)), "GPU")])
    assert choose(router).replica == "a"


def test_a_longer_queue_than_the_hit_saves_is_not_waited_for() -> None:
    router = router_of("a", "b")
    router.apply("a", 0, [stored(PROMPT[:320])])
    first = choose(router, list(range(5000, 5280)))  # of no cache: the first replica takes it
    assert first.replica == "a"
    assert choose(router).replica == "a"  # 280 tokens and a request before it, and 320 of its own that are there
    assert choose(router).replica == "b"


def begin_sessions(router: Router, count: int) -> list[str]:
    """Begin sessions with 96 tokens that all have in common, one after the other; return where they went."""
    names, num_events = [], dict.fromkeys(router.replicas, 0)
    for number in range(count):
        own = [10_000 + 100 * number + idx for idx in range(100)]
        route = choose(router, [*PROMPT[:96], *own], now_s=number)
        router.on_first_token(route, number + 0.1)
        router.end(route)
        router.apply(route.replica, num_events[route.replica], [stored([*PROMPT[:96], *own], seed=20 * number)])
        num_events[route.replica] += 1
        names.append(route.replica)
    return names


def test_sessions_with_one_beginning_are_spread_though_one_cache_had_it_first() -> None:
    assert begin_sessions(router_of("a", "b", "c", hit_weight=2.0), 60) == ["a"] * 60  # nobody has a queue
    names = begin_sessions(router_of("a", "b", "c", hit_weight=2.0, balance_weight=0.05), 300)
    assert all(60 <= names.count(name) <= 130 for name in "abc"), names


def test_balance_moves_no_session_from_a_long_hit() -> None:
    """What a replica computed more than others costs at most what the hit is worth."""
    router = router_of("a", "b", hit_weight=2.0, balance_weight=0.05)
    router.apply("a", 0, [stored(PROMPT)])
    for number in range(30):
        route = Route("a", NO_HIT, 0.0, 1000, _number=0)
        router.begin(route, RouteRequest([number] * 1000), 0.0)
        router.end(route)
    assert choose(router).replica == "a"  # 0.05 times 30,000 tokens against twice 992
    short_hit = RouteRequest([*PROMPT[:48], *range(5000, 5900)])
    scores = {route.replica: route.score for route in router.rank(short_hit, 0.0)}
    # The first request is on its way to "a", 8 tokens and itself: without that, its score would be that of "b".
    assert scores["a"] == pytest.approx(scores["b"] - (8 + 16) * 0.001)


def test_requests_without_hits_are_spread() -> None:
    router = router_of("a", "b", "c")
    names = [choose(router, [number] * 100).replica for number in range(6)]
    assert names == ["a", "b", "c"] * 2
    idle = router_of("a", "b", "c")
    spread = []
    for number in range(6):  # one after the other: no queue at any time
        route = choose(idle, [number] * 100)
        spread.append(route.replica)
        idle.on_first_token(route, 0.0)
        idle.end(route)
    assert spread == ["a", "b", "c"] * 2


def test_a_session_sticks_before_the_events_say_so_as_long_as_that_pays() -> None:
    router = router_of("a", "b")
    turn = choose(router, PROMPT, session="s")
    choose(router, [7] * 900)
    longer = [*PROMPT, *range(2000, 2100)]
    again = choose(router, longer, 1.0, session="s")
    assert (again.replica, again.is_by_session, again.hit.num_tokens) == (turn.replica, True, 1000)
    assert choose(router, [1, *longer], 1.0, session="s").hit.num_tokens == 0, "another prompt is no continuation"
    for _ in range(3):
        router.route(RouteRequest([9] * 2000), 1.0, excluded=["b"])
    assert choose(router, longer, 1.0, session="s").replica == "b"


def test_what_a_session_left_is_expected_for_a_limited_time() -> None:
    router = router_of("a", "b", session_s=10.0, announce_s=2.0)
    router.end(choose(router, PROMPT, session="s"))
    assert choose(router, PROMPT, 9.0, session="s").is_by_session
    router = router_of("a", "b", session_s=10.0, announce_s=2.0)
    router.end(choose(router, PROMPT, session="s"))
    assert not choose(router, PROMPT, 11.0, session="s").is_by_session
    router = router_of("a", "b", session_s=10.0, announce_s=2.0)
    router.apply("a", 0, [])
    router.end(choose(router, PROMPT, session="s"))
    assert not choose(router, PROMPT, 3.0, session="s").is_by_session


def test_a_gap_makes_a_cache_count_as_empty_until_it_is_known_again() -> None:
    router = router_of("a", "b")
    router.apply("b", 0, [stored(PROMPT)])
    assert router.apply("b", 2, []) is FeedState.GAP
    assert choose(router).hit.num_tokens == 0
    assert router.apply("b", 1, [], is_replay=True) is FeedState.SYNCED
    assert router.apply("b", 2, [], is_replay=True) is FeedState.SYNCED
    assert choose(router).replica == "b"
    router.apply("b", 7, [])
    router.apply("b", 8, [AllBlocksCleared(), stored(PROMPT[:160])])
    assert choose(router, PROMPT[:200]).hit.num_tokens == 160
    router.restart_replica("b")
    assert choose(router, PROMPT[:200]).hit.num_tokens == 0


def test_a_replica_without_events_is_routed_to_beside_one_with_blocks() -> None:
    router = Router()
    router.add_replica("a")
    router.add_replica("b")
    router.apply("b", 0, [stored(PROMPT)])
    assert choose(router).replica == "b"
    assert choose(router, [5] * 90).replica == "a"


def test_unavailable_and_excluded_replicas_get_nothing() -> None:
    router = router_of("a", "b")
    router.apply("a", 0, [stored(PROMPT)])
    router.set_available("a", False)
    assert choose(router).replica == "b"
    assert router.route(RouteRequest(PROMPT), 0.0, excluded=["b"]) is None
    router.set_available("a", True)
    assert choose(router).replica == "a"


def test_the_work_of_every_request_ends_exactly_once() -> None:
    router, rng = router_of("a", "b", "c"), random.Random(3)
    routes: list[Route] = []
    for number in range(500):
        routes.append(choose(router, [number] * rng.randrange(1, 400)))
        for route in rng.sample(routes, min(len(routes), 3)):
            rng.choice((lambda: router.on_first_token(route, 1.0), lambda: router.end(route)))()  # noqa: B023
    for route in routes:
        router.end(route)
        router.on_first_token(route, 2.0)
        router.end(route)
    for name in router.replicas:
        load = router.load_of(name)
        assert (load.pending_tokens, load.num_running, router.queue_s(name)) == (0, 0, 0.0)


@pytest.mark.parametrize("policy", ["cache_aware", "least_loaded"])
@pytest.mark.parametrize("tokens", [(), PROMPT[:320]])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_requests_at_once_are_spread_evenly_whatever_is_known_of_their_prompts(
    policy: str, tokens: Sequence[int], count: int
) -> None:
    """Without a token known, or wholly cached everywhere, each request counts from the moment of its choice."""
    names = tuple("abcdefg"[:count])
    router, rng = router_of(*names, policy=policy), random.Random(count)
    for name in names:
        router.apply(name, 0, [stored(PROMPT[:320])])
    running: list[Route] = []
    for number in range(600):
        if len(running) == 60:
            router.end(running.pop(rng.randrange(60)))
        running.append(choose(router, tokens, now_s=number * 0.01))
        if not tokens and rng.random() < 0.5:  # known prompts count less once they have begun
            router.on_first_token(rng.choice(running), number * 0.01)
        if number == 59:
            counts = [sum(route.replica == name for route in running) for name in names]
            assert max(counts) - min(counts) <= 1
    counts = [sum(route.replica == name for route in running) for name in names]
    assert sum(counts) == 60
    # Which ones end is random, so the next ones fill what is short: never more than a few apart.
    assert max(counts) - min(counts) <= 4


def test_requests_one_by_one_of_unknown_prompts_go_round() -> None:
    router = router_of("a", "b", "c")
    names = []
    for number in range(9):
        route = choose(router, (), now_s=number)
        names.append(route.replica)
        router.end(route)
    assert sorted(names) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3


def test_a_prompt_of_unknown_length_counts_as_an_average_one() -> None:
    router = router_of("a", "b")
    for number in range(400):
        router.end(choose(router, [number] * 1000, now_s=number))
    unknown = choose(router, (), now_s=400.0)
    assert router.load_of(unknown.replica).pending_tokens == pytest.approx(1000, rel=0.01)
    assert choose(router, [1] * 900, now_s=400.0).replica != unknown.replica
    assert choose(router, [2] * 50, now_s=400.0).replica != unknown.replica


def test_a_removed_replica_is_forgotten_and_its_requests_still_end() -> None:
    router = router_of("a", "b")
    route = choose(router, PROMPT, session="s")
    router.remove_replica(route.replica)
    router.on_first_token(route, 1.0)
    router.end(route)
    assert choose(router, PROMPT, session="s").replica == "b"
    with pytest.raises(ValueError, match="'b' twice"):
        router.add_replica("b")


def test_the_same_calls_give_the_same_decisions_and_candidates_suffice() -> None:
    """With 100 replicas, not all are compared; the best one is found nevertheless."""

    def decisions(num_replicas: int) -> list[tuple[str, float]]:
        rng, router = random.Random(7), router_of(*map(str, range(num_replicas)))
        bases = [[rng.randrange(9) for _ in range(640)] for _ in range(40)]
        routes: list[Route] = []
        for turn in range(100):
            tokens = [*rng.choice(bases)[: rng.randrange(100, 640)], *(rng.randrange(9) for _ in range(100))]
            route = choose(router, tokens, turn / 10)
            routes.append(route)
            events: list[KVEvent] = [stored(tokens, turn * 100)]
            router.apply(route.replica, router.feeds[route.replica].next_seq, events)
            if rng.random() < 0.9:
                router.end(routes.pop(rng.randrange(len(routes))))
            best = max(_score(router, name, tokens) for name in router.replicas)
            now = choose(router, tokens, turn / 10)
            assert now.score >= best - SIZE / 1000, "a part of a block may be missed, no more"
            router.end(now)
            routes.append(route)
        return [(route.replica, route.score) for route in routes]

    assert decisions(100) == decisions(100)


def _score(router: Router, name: str, tokens: list[int]) -> float:
    """Return the score of a replica without a look at candidates."""
    number = router.replicas.index(name)
    encoded = encode(tokens)
    hit = router.tree.hit(number, router.tree.path(encoded, Scope(), SIZE), encoded, Scope())
    return hit.value * router.config.seconds_per_token - router.queue_s(name)


def test_the_sessions_of_the_longest_ago_are_forgotten() -> None:
    router = router_of("a", "b", max_sessions=2)
    for number in range(3):
        router.end(choose(router, [number] * 100, session=str(number)))
    found = [choose(router, [number] * 100, session=str(number)).is_by_session for number in (2, 1, 0)]
    assert found == [True, True, False]


def test_of_very_many_holders_a_part_is_compared() -> None:
    router = router_of(*map(str, range(MAX_IDLE + MAX_HOLDERS + 10)))
    for name in router.replicas:
        router.apply(name, 0, [stored(PROMPT)])
        assert router.num_blocks(name) == len(PROMPT) // SIZE
    routes = router.rank(RouteRequest(PROMPT), 0.0)
    assert len({route.replica for route in routes}) == len(routes) == MAX_IDLE + MAX_HOLDERS
    assert {route.hit.num_tokens for route in routes} == {992}
