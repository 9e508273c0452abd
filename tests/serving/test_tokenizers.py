"""Tokens of prompts from servers whose tokenizers hang, fail or do not exist, in simulated time."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from quire.fleet.proxy.tokenizers import ASK_S, HEDGE_S
from tests.serving.simulated import Got, Reply, SimulatedProxy, SimulatedServer, run_simulated, statuses

TOKENS = (200, json.dumps({"tokens": [1, 2, 3], "adapter": None, "cache_salt": None}).encode())


def server_of(answer: tuple[int, bytes] | None, **fields: Any) -> SimulatedServer:
    routes = {} if answer is None else {"/prompt_tokens": answer}
    return SimulatedServer(lambda _: Reply(), routes=routes, **fields)


def num_asked(server: SimulatedServer) -> int:
    return sum("/prompt_tokens" in request for request in server.own)


async def one_by_one(proxy: SimulatedProxy, count: int) -> list[Got]:
    return [await proxy.post(prompt=str(number)) for number in range(count)]


def test_a_tokenizer_that_hangs_delays_three_requests_shortly() -> None:
    servers = [server_of(TOKENS, hangs={"/prompt_tokens"}), server_of(TOKENS)]

    async def main() -> tuple[list[Got], dict[str, Any]]:
        async with SimulatedProxy(servers, router="round_robin") as proxy:
            return await one_by_one(proxy, 40), await proxy.state()

    got, state = run_simulated(main())
    assert statuses(got) == {200: 40}
    slow = [each.seconds for each in got if each.seconds > 0.06]
    assert len(slow) <= 5
    assert max(slow) == pytest.approx(HEDGE_S + 0.05, abs=0.01)
    assert [replica["tokenizer"] for replica in state["replicas"]] == ["open", "closed"]


def test_of_requests_at_once_half_are_delayed_by_a_tokenizer_that_hangs_and_later_ones_are_not() -> None:
    servers = [server_of(TOKENS, hangs={"/prompt_tokens"}), server_of(TOKENS)]

    async def main() -> tuple[list[Got], list[Got]]:
        async with SimulatedProxy(servers) as proxy:
            first = await asyncio.gather(*(proxy.post(prompt=str(number)) for number in range(60)))
            return first, await asyncio.gather(*(proxy.post(prompt=f"later {number}") for number in range(60)))

    first, later = run_simulated(main())
    assert max(each.seconds for each in first) == pytest.approx(HEDGE_S + 0.05, abs=0.01)
    assert max(each.seconds for each in later) == pytest.approx(0.05, abs=0.01)


def test_where_all_tokenizers_hang_requests_are_routed_without_tokens() -> None:
    servers = [server_of(TOKENS, hangs={"/prompt_tokens"}) for _ in range(3)]

    async def main() -> list[Got]:
        async with SimulatedProxy(servers) as proxy:
            return await one_by_one(proxy, 30)

    got = run_simulated(main())
    assert statuses(got) == {200: 30}
    assert max(each.seconds for each in got) == pytest.approx(HEDGE_S + ASK_S + 0.05, abs=0.01)
    assert sum(each.seconds > 0.06 for each in got) <= 12
    assert min(Counter(each.replica for each in got).values()) >= 9


def test_servers_of_another_engine_are_asked_once_and_get_equal_shares() -> None:
    """Sixty requests at once: before, all of them went to the first server."""
    servers = [server_of(None) for _ in range(4)]

    async def main() -> list[Got]:
        async with SimulatedProxy(servers) as proxy:
            await one_by_one(proxy, 4)
            return await asyncio.gather(*(proxy.post(prompt=str(number)) for number in range(60)))

    got = run_simulated(main())
    assert all(14 <= count <= 16 for count in Counter(each.replica for each in got).values())
    assert [num_asked(server) for server in servers] == [1, 1, 1, 1]


def test_a_prompt_that_one_server_refuses_is_not_asked_of_another() -> None:
    servers = [server_of((400, b'{"error": {}}')), server_of((404, b'{"error": {"code": "model_not_found"}}'))]

    async def main() -> dict[str, Any]:
        async with SimulatedProxy(servers) as proxy:
            await one_by_one(proxy, 10)
            return await proxy.state()

    state = run_simulated(main())
    assert sum(map(num_asked, servers)) == 10
    assert [replica["tokenizer"] for replica in state["replicas"]] == ["closed", "closed"]


def test_a_server_whose_probe_hangs_delays_neither_the_start_nor_requests() -> None:
    servers = [server_of(TOKENS, hangs={"/health"}), server_of(TOKENS, hangs={"/kv_event_sources"}), server_of(TOKENS)]

    async def main() -> tuple[float, list[Got]]:
        started_s = asyncio.get_running_loop().time()
        async with SimulatedProxy(servers) as proxy:
            return asyncio.get_running_loop().time() - started_s, await one_by_one(proxy, 6)

    start_s, got = run_simulated(main())
    assert start_s <= 2.0
    assert statuses(got) == {200: 6}
    assert max(each.seconds for each in got) < 0.1
