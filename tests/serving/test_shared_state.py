"""What all servers share, in simulated time: changes that a server has missed, and lists of different models."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from quire.fleet.proxy import shared_state
from tests.serving.simulated import Got, Reply, SimulatedProxy, SimulatedServer, run_simulated

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PIN, UNPIN, RESET = "/pin_prefix", "/unpin_prefix", "/reset_prefix_cache"


def listing(*names: str) -> tuple[int, bytes]:
    return 200, json.dumps({"object": "list", "data": [{"id": name, "object": "model"} for name in names]}).encode()


def tags(*names: str) -> tuple[int, bytes]:
    return 200, json.dumps({"models": [{"name": name, "model": name} for name in names]}).encode()


def well(_: dict[str, Any]) -> Reply:
    return Reply(parts=[b"{}"])


def changes_of(server: SimulatedServer) -> list[tuple[str, dict[str, Any]]]:
    """Return the changes that a server was told by the proxy itself, in order."""
    parts = [request.split(" ", 2) for request in server.own if request.startswith("POST")]
    return [(path, json.loads(body)) for _, path, body in parts if path in shared_state.NAME_OF]


async def restart(proxy: SimulatedProxy, server: SimulatedServer, do: Callable[[], Any]) -> None:
    """Kill a server, do something while it is down, and wait until it takes requests again."""
    server.own.clear()
    server.kill()
    await asyncio.sleep(1.5)
    await do()
    await asyncio.sleep(server.restart_s + 2.5)
    assert all(replica["is_up"] for replica in (await proxy.state())["replicas"])


def test_a_server_that_comes_up_is_told_what_it_has_missed_in_order() -> None:
    servers = [SimulatedServer(well), SimulatedServer(well)]

    async def main() -> None:
        async with SimulatedProxy(servers) as proxy:
            await proxy.post(LOAD, lora_name="a", lora_path="/a")
            await proxy.post(LOAD, lora_name="b", lora_path="/b")
            await proxy.post(RESET)
            await proxy.post(PIN, name="p", prompt="x", model="a")

            async def change() -> None:
                assert (await proxy.post(LOAD, lora_name="a", lora_path="/new")).status == 200
                await proxy.post(UNLOAD, lora_name="b")
                await proxy.post(PIN, name="q", prompt="y")

            await restart(proxy, servers[0], change)

    run_simulated(main())
    assert changes_of(servers[0]) == [
        (LOAD, {"lora_name": "a", "lora_path": "/new"}),
        (UNLOAD, {"lora_name": "b"}),
        (PIN, {"name": "p", "prompt": "x", "model": "a"}),
        (PIN, {"name": "q", "prompt": "y"}),
    ]
    assert not changes_of(servers[1])


def test_a_reset_is_repeated_only_where_it_was_missed() -> None:
    servers = [SimulatedServer(well), SimulatedServer(well)]

    async def main() -> list[list[tuple[str, dict[str, Any]]]]:
        async with SimulatedProxy(servers) as proxy:
            await proxy.post(RESET)
            told = []

            async def nothing() -> None:
                pass

            async def reset() -> None:
                await proxy.post(RESET)

            for change in (nothing, reset, nothing):
                await restart(proxy, servers[0], change)
                told.append(changes_of(servers[0]))
            return told

    assert run_simulated(main()) == [[], [(RESET, {})], []]


def test_a_server_gets_requests_only_after_it_was_told() -> None:
    first = SimulatedServer(well, hangs={LOAD})
    servers = [first, SimulatedServer(well)]

    async def main() -> tuple[dict[str, Any], list[Got], list[Got]]:
        async with SimulatedProxy(servers) as proxy:
            await proxy.post(LOAD, lora_name="a", lora_path="/a")
            first.kill()
            await asyncio.sleep(10.0)
            state = (await proxy.state())["replicas"][0]
            early = [await proxy.post(prompt=str(number)) for number in range(6)]
            first.hangs.clear()
            await asyncio.sleep(125.0)
            late = [await proxy.post(prompt=str(number)) for number in range(6)]
            return state, early, late

    state, early, late = run_simulated(main())
    assert not state["is_available"]
    assert {got.replica for got in early} == {"http://server-1"}
    assert "http://server-0" in {got.replica for got in late}


def test_a_server_that_is_lost_during_a_change_is_told_later_and_the_change_succeeds() -> None:
    def dies(fields: dict[str, Any]) -> Reply:
        return Reply(kills="lora_name" in fields)

    servers = [SimulatedServer(dies), SimulatedServer(well)]

    async def main() -> int:
        async with SimulatedProxy(servers) as proxy:
            got = await proxy.post(LOAD, lora_name="a", lora_path="/a")
            servers[0].behave = well
            await asyncio.sleep(6.0)
            assert (await proxy.state())["replicas"][0]["is_available"]
            return got.status

    assert run_simulated(main()) == 200
    assert changes_of(servers[0]) == [(LOAD, {"lora_name": "a", "lora_path": "/a"})]


def test_changes_at_once_are_told_to_all_servers_in_one_order_even_to_one_that_comes_up() -> None:
    servers = [SimulatedServer(well, restart_s=0.3) for _ in range(3)]

    async def main() -> None:
        async with SimulatedProxy(servers) as proxy:
            servers[0].kill()
            tasks = []
            for number in range(60):
                tasks.append(asyncio.create_task(proxy.post(LOAD, lora_name="a", lora_path=str(number))))
                await asyncio.sleep(0.05)
            await asyncio.gather(*tasks)
            await asyncio.sleep(5.0)

    run_simulated(main())
    told = [[body for _, body in changes_of(server)] + server.asked for server in servers]
    assert told[1] == told[2]
    assert [body["lora_path"] for body in told[1]] == [str(number) for number in range(60)]
    assert told[0][-1] == told[1][-1]


def test_a_change_that_all_servers_refuse_is_not_repeated() -> None:
    def refuses(_: dict[str, Any]) -> Reply:
        return Reply(400, parts=[b'{"error": {"code": "invalid_value"}}'])

    servers = [SimulatedServer(refuses), SimulatedServer(refuses)]

    async def main() -> None:
        async with SimulatedProxy(servers) as proxy:
            got = await proxy.post(UNPIN, name="p")
            assert (got.status, got.code) == (400, "invalid_value")
            servers[0].kill()
            await asyncio.sleep(6.0)

    run_simulated(main())
    assert not changes_of(servers[0])


def test_the_changes_that_are_kept_are_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_state, "MAX_CHANGES", 3)
    servers = [SimulatedServer(well), SimulatedServer(well)]

    async def main() -> None:
        async with SimulatedProxy(servers) as proxy:
            for number in range(5):
                await proxy.post(PIN, name=str(number), prompt="x")

            async def nothing() -> None:
                pass

            await restart(proxy, servers[0], nothing)

    run_simulated(main())
    assert [body["name"] for _, body in changes_of(servers[0])] == ["2", "3", "4"]
    assert "will not be told a /pin_prefix" in caplog.text


def test_requests_go_to_the_servers_that_have_their_model(caplog: pytest.LogCaptureFixture) -> None:
    def server_of(*names: str) -> SimulatedServer:
        def behave(fields: dict[str, Any]) -> Reply:
            if fields.get("model", names[0]).removesuffix(":latest") in names:
                return Reply()
            return Reply(404, parts=[b'{"error": {"code": "model_not_found"}}'])

        return SimulatedServer(behave, routes={"/v1/models": listing(*names), "/api/tags": tags(*names)})

    servers = [server_of("small"), server_of("large"), server_of("small", "extra")]
    caplog.set_level(logging.WARNING)

    async def main() -> dict[str, Any]:
        async with SimulatedProxy(servers) as proxy:
            places: dict[str, Any] = {}
            for path in ("/v1/completions", "/v1/embeddings", "/api/chat"):
                for model in ("small", "large", "extra"):
                    got = await asyncio.gather(*(proxy.post(path, model=model, prompt=str(n)) for n in range(6)))
                    assert {each.status for each in got} == {200}
                    places[model] = places.get(model, set()) | {each.replica[-1] for each in got}
            assert (await proxy.post("/api/chat", model="large:latest")).replica[-1] == "1"
            assert (await proxy.get("/v1/models/extra")).replica[-1] == "2"
            missing = await proxy.post(model="none", prompt="a")
            assert (missing.status, missing.code) == (404, "model_not_found")
            models = json.loads((await proxy.get("/v1/models")).body)
            assert [card["id"] for card in models["data"]] == ["small", "large", "extra"]
            models = json.loads((await proxy.get("/api/tags")).body)
            assert [card["name"] for card in models["models"]] == ["small", "large", "extra"]
            servers[1].kill()
            gone = await proxy.post(model="large", prompt="a")
            assert (gone.status, gone.code) == (503, "no_replica")
            return places

    places = run_simulated(main())
    assert places == {"small": {"0", "2"}, "large": {"1"}, "extra": {"2"}}
    assert caplog.text.count("different models") == 1


def test_servers_that_list_no_models_get_requests_for_any() -> None:
    servers = [
        SimulatedServer(lambda _: Reply()),
        SimulatedServer(lambda _: Reply(), routes={"/v1/models": listing("a")}),
    ]

    async def main() -> Counter[str]:
        async with SimulatedProxy(servers) as proxy:
            got = [await proxy.post(model="b", prompt=str(number)) for number in range(4)]
            return Counter(each.replica for each in got)

    assert run_simulated(main()) == {"http://server-0": 4}
