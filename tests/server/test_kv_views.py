"""What the routes of the page's memory show, and to whom, in process: the tree, the map's events, first tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.engine.async_llm import AsyncLLM
from quire.server.app import build_app
from quire.server.kv_views import prefix_tree
from quire.server.kv_views.prefix_tree import MAX_READERS
from quire.server.requests.body import BodyReader
from quire.server.settings import ServerConfig
from quire.server.state.state import ServerState

PROMPT = list(range(30, 100))


@asynccontextmanager
async def serving(folder: Path, **config: Any) -> AsyncIterator[tuple[ServerState, httpx.AsyncClient]]:
    """Yield an application in process and a client of it."""
    async with AsyncLLM.from_options(str(folder), num_kv_blocks=300, num_threads=1) as llm:
        bodies = BodyReader(1 << 20, 5000)
        try:
            state = ServerState(llm, ServerConfig(**config), bodies, "0", created=0)
            transport = httpx.ASGITransport(build_app(state))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                yield state, client
        finally:
            bodies.close()


async def first_event(state: ServerState, tenant: str | None) -> dict[str, Any]:
    watcher = state.views.block_map.watch(tenant)
    try:
        async with asyncio.timeout(60):
            return dict(json.loads((await anext(watcher.events(60))).removeprefix(b"data: ")))
    finally:
        state.views.block_map.leave(watcher)


def test_tenants_see_their_own_in_every_view(folder: Path) -> None:
    async def run() -> None:
        async with serving(folder, tenant_header="X-Tenant") as (state, client):
            for name, tail in (("acme", [1]), ("acme", [2]), ("zeta", [3])):
                body = {"prompt": [*PROMPT, *tail], "max_tokens": 2}
                answer = await client.post("/v1/completions", json=body, headers={"X-Tenant": name})
                assert answer.status_code == 200
            trees = {
                name: (await client.get("/kv/tree", headers={"X-Tenant": name})).json()["segments"]
                for name in ("acme", "zeta", "new")
            }
            assert [len(trees[name]) > 0 for name in ("acme", "zeta", "new")] == [True, True, False]
            blocks = {name: {segment["block"] for segment in trees[name]} for name in trees}
            assert not blocks["acme"] & blocks["zeta"]
            assert all(isinstance(segment["text"], str) for name in trees for segment in trees[name])
            assert (await client.get("/kv/tree")).json()["error"]["code"] == "no_tenant"
            # Times of others are not shown either, nor what happened to their blocks.
            assert len(state.in_flight.ended()) == 3
            assert (await first_event(state, "new"))["first_token_s"] is None
            event = await first_event(state, "acme")
            assert set(event["first_token_s"]) == {"p50", "p90"}
            assert event["recent"] == {"copied": [], "merged": [], "evicted": []}

    asyncio.run(run())


def test_the_map_tells_what_happened_while_it_is_watched_and_records_nothing_afterwards(folder: Path) -> None:
    async def run() -> None:
        async with serving(folder) as (state, client):
            pools = [group.pool for group in (await state.llm.inspect(lambda engine: engine.scheduler.memory.groups))]
            watcher = state.views.block_map.watch(None)
            async with asyncio.timeout(60):
                events = watcher.events(60)
                await anext(events)
                body = {"prompt": PROMPT, "max_tokens": 4, "n": 2, "ignore_eos": True}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
                copied: list[int] = []
                num_copies = 0
                while not num_copies:
                    event = json.loads((await anext(events)).removeprefix(b"data: "))
                    copied += event["recent"]["copied"]
                    num_copies = event["usage"]["num_copies"]
                # Samples share the prompt's last block until the first of them writes.
                assert len(copied) == num_copies
                assert event["first_token_s"]["p50"] > 0
                state.views.block_map.leave(watcher)
                while any(pool.recent is not None for pool in pools):
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_the_tree_is_read_again_when_something_changed_and_readers_are_bounded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_tree, "INTERVAL_S", 0.05)

    async def run() -> None:
        async with serving(folder) as (state, client):
            scans, may_scan = 0, asyncio.Event()
            inspect: Callable[..., Coroutine[Any, Any, Any]] = state.llm.inspect

            async def counted(look: Any) -> Any:
                nonlocal scans
                scans += 1
                await may_scan.wait()
                return await inspect(look)

            state.llm.inspect = counted  # type: ignore[method-assign]
            reading = [asyncio.create_task(client.get("/kv/tree")) for _ in range(MAX_READERS + 3)]
            await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            may_scan.set()
            codes = [(await each).status_code for each in reading]
            assert (codes.count(200), codes.count(503)) == (MAX_READERS, 3)
            # One reading serves all, until something has changed and the interval has passed.
            assert scans == 1
            assert reading[0].result().json() == {"segments": [], "is_whole": True}
            await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1})
            async with asyncio.timeout(60):
                while not (await client.get("/kv/tree")).json()["segments"]:
                    await asyncio.sleep(0.01)
            await client.get("/kv/tree")
            assert scans == 2

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/kv/tree", "/kv/map", "/kv/block?pool=0&block=1", "/kv/request?number=1"])
def test_the_views_need_the_operator_s_key_where_there_is_one(path: str) -> None:
    class Nothing:
        @property
        def metrics(self) -> Nothing:
            return self

        def on_http_request(self, route: str, method: str, status: int) -> None:
            assert (route, method) == (path.partition("?")[0], "GET")
            assert status in (401, 403)

        def change_mark(self) -> tuple[int, ...]:
            raise AssertionError("a refused request must not reach the engine")

    async def run() -> None:
        config = ServerConfig(api_key="client", operator_key="operator")
        state = ServerState(Nothing(), config, BodyReader(1 << 20, 10), "0", created=0)  # type: ignore[arg-type]
        transport = httpx.ASGITransport(build_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for headers, code in (({}, 401), ({"x-api-key": "client"}, 403), ({"x-api-key": "wrong"}, 401)):
                assert (await client.get(path, headers=headers)).status_code == code
        state.bodies.close()

    asyncio.run(run())
