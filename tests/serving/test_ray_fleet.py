"""The replicas behind Serve's router: the core's decisions, under Serve's names and in Serve's order of calls."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Sequence
from typing import Any

import pytest

from quire.config import KVEventsConfig
from quire.distributed.kv_events.publisher import KVEventPublisher
from quire.fleet.ray.call import RoutedCall, Ticket
from quire.fleet.ray.fleet import QUEUE_LEN_S, ReplicaFleet
from quire.fleet.routing.feed import FeedState
from quire.fleet.routing.router import Router, RouterConfig, RouteRequest
from quire.memory.kv_events import BlockStored, KVEvent, encode

SIZE = 16
PROMPT = list(range(1000))
NODE = "10.0.0.1"


def stored(tokens: Sequence[int]) -> list[KVEvent]:
    count = len(tokens) // SIZE
    return [BlockStored(tuple(range(count)), None, encode(tokens[: count * SIZE]), SIZE, "GPU")]


def fleet_of(*names: str) -> ReplicaFleet:
    fleet = ReplicaFleet(RouterConfig(hit_weight=1.0), NODE)

    async def start() -> None:
        fleet.update({name: {} for name in names})

    asyncio.run(start())
    return fleet


def ticket_of(tokens: Sequence[int] = PROMPT, session: str | None = None, tried: tuple[str, ...] = ()) -> Ticket:
    return Ticket(RouteRequest(tokens, session=session), tried)


@pytest.mark.parametrize("seed", range(5))
def test_it_decides_as_the_core_does(seed: int) -> None:
    rng = random.Random(seed)
    names = ["a", "b", "c"]
    fleet, twin = fleet_of(*names), Router(RouterConfig(hit_weight=1.0))
    for name in names:
        twin.add_replica(name)
    running: list[tuple[Ticket, Any]] = []
    seqs = dict.fromkeys(names, 0)
    for step in range(200):
        now_s = step / 10
        kind = rng.randrange(4)
        if kind == 0:
            name, tokens = rng.choice(names), PROMPT[rng.randrange(4) * 100 :]
            for router in (fleet.router, twin):
                router.apply(name, seqs[name], stored(tokens))
            seqs[name] += 1
        elif kind == 1 and running:
            ticket, route = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.5:
                fleet.on_first_token(ticket, now_s)
                twin.on_first_token(route, now_s)
            fleet.end(ticket)
            twin.end(route)
        else:
            start = rng.randrange(4) * 100
            tokens, session = PROMPT[start : start + rng.randrange(50, 600)], rng.choice(["s", "t", None])
            ticket, request = ticket_of(tokens, session), RouteRequest(tokens, session=session)
            ranked = fleet.rank(ticket, now_s)
            wanted = twin.rank(request, now_s)
            assert ranked == [route.replica for route in wanted]
            twin.begin(wanted[0], request, now_s)
            fleet.on_routed(ticket, ranked[0], now_s)
            assert (ticket.replica, ticket.num_hit) == (wanted[0].replica, wanted[0].hit.num_tokens)
            running.append((ticket, wanted[0]))
        assert [fleet.router.queue_s(name) for name in names] == [twin.queue_s(name) for name in names]


def test_work_goes_with_the_replica_that_has_taken_the_request() -> None:
    fleet = fleet_of("a", "b")
    ticket = ticket_of()
    first, second = fleet.rank(ticket, 0.0)
    assert fleet.router.queue_s(first) > 0 == fleet.router.queue_s(second)
    fleet.on_routed(ticket, second, 0.0)
    assert fleet.router.queue_s(second) > 0 == fleet.router.queue_s(first)
    fleet.end(ticket)
    assert fleet.router.queue_s(second) == 0


def test_a_request_that_is_ranked_again_counts_once() -> None:
    fleet = fleet_of("a", "b")
    ticket = ticket_of()
    fleet.rank(ticket, 0.0)
    fleet.rank(ticket, 0.0)
    fleet.end(ticket)
    assert [fleet.router.queue_s(name) for name in "ab"] == [0.0, 0.0]


def test_a_ticket_that_was_ended_before_it_was_ranked_is_no_work() -> None:
    fleet = fleet_of("a")
    ticket = ticket_of()
    ticket.end()
    assert fleet.rank(ticket, 0.0) == ["a"]
    assert fleet.router.queue_s("a") == 0


def test_replicas_that_were_tried_come_last() -> None:
    fleet = fleet_of("a", "b", "c")
    fleet.router.apply("b", 0, stored(PROMPT))
    assert fleet.rank(ticket_of(), 0.0)[0] == "b"
    assert fleet.rank(ticket_of(tried=("b",)), 0.0)[-1] == "b"
    assert set(fleet.rank(ticket_of(tried=("a", "b", "c")), 0.0)) == {"a", "b", "c"}


def test_a_call_without_a_prompt_goes_where_the_queue_is_shortest_and_is_no_work() -> None:
    fleet = fleet_of("a", "b")
    busy = fleet.rank(ticket_of(), 0.0)[0]
    other = "b" if busy == "a" else "a"
    for _ in range(3):
        assert fleet.rank(Ticket(), 0.0)[0] == other
    assert fleet.router.queue_s(other) == 0
    assert [fleet.rank(Ticket(is_pinned=True), 0.0)[0] for _ in range(2)] == ["a", "a"]


def test_requests_of_other_routers_count_for_a_while() -> None:
    fleet = fleet_of("a", "b")
    own = ticket_of(PROMPT[:100])
    name = fleet.rank(own, 0.0)[0]
    fleet.on_queue_len(name, 1, 0.0)  # its own alone
    assert fleet.router.queue_s(name) == pytest.approx(0.116)  # its tokens, and 16 for the request itself
    fleet.on_queue_len(name, 3, 0.0)  # two more, each as long as its own
    assert fleet.router.queue_s(name) == pytest.approx(3 * 0.116)
    fleet.rank(Ticket(), QUEUE_LEN_S + 0.1)
    assert fleet.router.queue_s(name) == pytest.approx(0.116)
    fleet.on_queue_len("none", 3, 0.0)


def test_a_call_without_a_prompt_is_this_routers_own() -> None:
    fleet = fleet_of("a", "b")
    ticket = Ticket()
    name = fleet.rank(ticket, 0.0)[0]
    fleet.on_queue_len(name, 1, 0.0)  # as Serve calls it: before it says that the request is routed
    assert fleet.router.queue_s(name) == 0
    fleet.on_routed(ticket, name, 0.0)
    fleet.end(ticket)
    fleet.on_queue_len(name, 1, 0.0)
    assert fleet.router.queue_s(name) > 0


def test_a_replica_that_ends_is_forgotten_with_its_work() -> None:
    fleet = fleet_of("a", "b")
    tickets = [ticket_of([number] * 50) for number in range(4)]
    for ticket in tickets:
        fleet.rank(ticket, 0.0)
    fleet.drop("a")
    fleet.drop("a")
    assert fleet.names == fleet.rank(Ticket(), 0.0) == ["b"]
    for ticket in tickets:
        fleet.on_first_token(ticket, 0.0)
        fleet.end(ticket)
    assert fleet.router.queue_s("b") == 0


def test_events_of_a_replica_are_followed_where_it_can_be_reached() -> None:
    async def run() -> None:
        fleet = ReplicaFleet(RouterConfig(), NODE)
        endpoint = "tcp://127.0.0.1:*"
        publisher = KVEventPublisher(
            KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=endpoint)
        )
        source = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint, "topic": ""}
        try:
            # The loopback of another node is not this one's.
            fleet.update(
                {
                    "here": {"kv_events": source, "node_ip": NODE},
                    "elsewhere": {"kv_events": source, "node_ip": "10.0.0.2"},
                    "silent": {"kv_events": None},
                }
            )
            publisher.publish(stored(PROMPT))
            async with asyncio.timeout(30):
                while fleet.router.feeds["here"].state is not FeedState.SYNCED:
                    await asyncio.sleep(0.01)
            assert fleet.rank(ticket_of())[0] == "here"
            state = await fleet.describe_soon()
            assert [state[name]["num_blocks"] for name in ("here", "elsewhere", "silent")] == [62, 0, 0]
            # The task ends with the replica.
            fleet.update({"silent": {}})
            await asyncio.sleep(0)
            assert fleet.names == ["silent"]
        finally:
            publisher.close()

    asyncio.run(run())


def test_a_call_leaves_its_ticket_behind() -> None:
    call = RoutedCall("POST", b"/v1/completions", ((b"a", b"b"),), b"{}", ticket_of())
    sent = pickle.loads(pickle.dumps(call))
    assert (sent.method, sent.target, sent.headers, sent.body) == ("POST", b"/v1/completions", ((b"a", b"b"),), b"{}")
    assert sent.ticket is None
