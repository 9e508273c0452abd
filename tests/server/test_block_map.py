"""The live map of the KV cache: its packing against a plain twin, its watchers, and its routes on a real server."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from base64 import b64decode
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.errors import WorkerError
from quire.server.kv_views import block_planes
from quire.server.kv_views.block_map import MAX_WATCHERS, BlockMapHub
from quire.server.kv_views.block_planes import Planes
from quire.server.requests.errors import ApiError
from tests.server.process import ServerProcess, running
from tests.server.test_errors import check_form

Cells = dict[int, tuple[int, int]]


def unpack(packed: bytes) -> Cells:
    """Return the cells of packed runs, read number by number."""
    numbers: list[int] = []
    value = shift = 0
    for byte in packed:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append(value)
            value = shift = 0
    cells: Cells = {}
    at = 0
    for gap, length, state, owner in zip(*[iter(numbers)] * 4, strict=True):
        at += gap
        cells.update(dict.fromkeys(range(at, at + length), (state, owner)))
        at += length
    return cells


def planes(draw: random.Random, size: int) -> Planes:
    """Return the planes of two pools with random contents."""
    pools, tables = [], []
    for idx in range(2):
        holders = bytes(draw.choice((0, 0, 1, 2, 200)) for _ in range(size))
        flags = bytes(draw.choice((0, 1)) for _ in range(size))
        pinned = frozenset(draw.sample(range(1, size), 3))
        media = frozenset(draw.sample([cell for cell in range(1, size) if holders[cell]], 9))
        pools.append(SimpleNamespace(holders=holders, published=flags, pinned=pinned, media=media))
        for number in (7, 300):
            table = tuple(draw.sample([cell for cell in range(1, size) if holders[cell]], size // 3))
            tables.append(SimpleNamespace(pool_idx=idx, number=number, block_ids=table))
    return Planes.of(SimpleNamespace(pools=pools, tables=tables))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_equal_parts_are_taken_over_from_the_planes_before(seed: int) -> None:
    draw = random.Random(seed)
    nodes = [None, *(object() for _ in range(5))]
    planes_before = None
    holders, published, pinned = [0] * 1000, [nodes[0]] * 1000, frozenset({7})
    for _ in range(30):
        holders, published = holders.copy(), published.copy()
        for _ in range(draw.randrange(5)):
            holders[draw.randrange(1, 1000)] = draw.choice((0, 1, 2, 300))
            published[draw.randrange(1, 1000)] = draw.choice(nodes)
        if draw.random() < 0.2:
            pinned = frozenset(draw.sample(range(1, 1000), 2))
        pool = SimpleNamespace(holders=holders, published=published, pinned=pinned, media=frozenset())
        scan: Any = SimpleNamespace(pools=[pool, pool], tables=[])
        whole, planes_before = Planes.of(scan), Planes.of(scan, planes_before)
        assert planes_before.states == whole.states


@pytest.mark.parametrize("seed", range(4))
def test_changes_lead_from_one_map_to_the_next(seed: int) -> None:
    draw = random.Random(seed)
    before, after = planes(draw, 400), planes(draw, 400)
    shown = unpack(before.runs(before.changed(None), None))
    shown |= unpack(after.runs(after.changed(before), None))
    assert len(after.changed(before)) < 800
    assert after.media > after.media & before.media
    for cell, (state, owner) in enumerate(zip(after.states, after.owners, strict=True)):
        assert shown.get(cell, (0, 0)) == (state + 256 * (cell in after.media), owner)
    # Nothing but the media of two blocks changes.
    other = after._replace(media=after.media ^ {5, 700})
    assert other.changed(after) == [5, 700]


def test_a_state_has_holders_pins_and_publication() -> None:
    pool = SimpleNamespace(
        holders=bytes([0, 1, 3, 255, 0]),
        published=bytes([0, 0, 1, 1, 1]),
        pinned=frozenset({2}),
        media=frozenset({2, 3, 4}),
    )
    tables = [SimpleNamespace(pool_idx=0, number=n, block_ids=(2, n)) for n in (1, 3)]
    found = Planes.of(SimpleNamespace(pools=[pool], tables=tables))  # type: ignore[arg-type]
    assert list(found.states) == [0, 4, 3 * 4 + 3, 63 * 4 + 1, 1]
    # No count is too great, and none runs over into a neighbour.
    pool = SimpleNamespace(
        holders=[0, 255, 256, 70_000, 1, 1 << 20], published=[None] * 6, pinned=frozenset(), media=frozenset()
    )
    wide = Planes.of(SimpleNamespace(pools=[pool], tables=[]))  # type: ignore[arg-type]
    assert list(wide.states) == [0, 63 * 4, 63 * 4, 63 * 4, 4, 63 * 4]
    # Of a shared block the oldest request is named.
    assert list(found.owners) == [0, 1, 1, 3, 0]
    # A tenant that holds block 3 alone sees of the others whether they are used, idle or free.
    assert unpack(found.runs(range(5), {3})) == {0: (0, 0), 1: (4, 0), 2: (4, 0), 3: (253 + 256, 3), 4: (1, 0)}
    assert [state for state, _ in unpack(found.runs(range(5), None)).values()] == [0, 4, 15 + 256, 253 + 256, 1 + 256]


def test_an_idle_pool_is_a_few_bytes() -> None:
    for holders, published in ((bytes(65536), bytes(65536)), (bytes(65536), b"\1" * 65536)):
        pool = SimpleNamespace(holders=holders, published=published, pinned=frozenset(), media=frozenset())
        found = Planes.of(SimpleNamespace(pools=[pool], tables=[]))  # type: ignore[arg-type]
        assert len(found.runs(found.changed(None), None)) <= 8


def test_a_watcher_that_does_not_read_holds_one_event_and_gets_a_snapshot() -> None:
    async def run() -> None:
        # An engine that is in a long step.
        never = asyncio.get_running_loop().create_future()
        llm = SimpleNamespace(change_mark=lambda: (0,), inspect=lambda _: never)
        hub = BlockMapHub(llm, lambda: False)  # type: ignore[arg-type]
        watcher = hub.watch(None)
        hub.snapshot = lambda _: b"whole"  # type: ignore[assignment, misc, method-assign]
        events = watcher.events(0.01)
        watcher.put(b"dropped")
        assert await anext(events) == b"whole"
        watcher.put(b"change 1")
        assert await anext(events) == b"change 1"
        watcher.put(b"change 2")
        watcher.put(b"change 3")
        assert await anext(events) == b"whole"
        assert await anext(events) == b": ping\n\n"
        watcher.close()
        with pytest.raises(StopAsyncIteration):
            await anext(events)
        for _ in range(MAX_WATCHERS - 1):
            hub.watch(None)
        with pytest.raises(ApiError, match="16 watchers"):
            hub.watch(None)
        hub.leave(watcher)
        hub.watch(None)

    asyncio.run(run())


def test_watchers_leave_when_the_engine_has_died_and_when_the_server_stops() -> None:
    async def run(llm: Any, *, is_over: bool) -> None:
        watcher = BlockMapHub(llm, lambda: is_over).watch(None)
        async with asyncio.timeout(30):
            assert [event async for event in watcher.events(30)] == []

    async def fail(_: object) -> None:
        raise WorkerError("the engine does not run")

    llm = SimpleNamespace(change_mark=lambda: (0,), inspect=fail)
    for is_over in (False, True):
        asyncio.run(run(llm, is_over=is_over))


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream."""
    return (json.loads(line[6:]) for line in lines if line.startswith("data: "))


def follow(events: Iterator[dict[str, Any]]) -> Iterator[tuple[Cells, dict[str, Any]]]:
    """Yield the map after each event."""
    cells: Cells = {}
    for event in events:
        cells = ({} if "layout" in event else cells) | unpack(b64decode(event["runs"]))
        cells = {cell: value for cell, value in cells.items() if value[0]}
        yield cells, event


def test_the_map_follows_a_request(server: ServerProcess) -> None:
    server.http.post("/reset_prefix_cache")
    prompt = list(range(30, 130))
    body = {"prompt": prompt, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    assert server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}).status_code == 200
    with server.http.stream("GET", "/kv/map") as stream:
        maps = follow(events_of(stream.iter_lines()))
        cells, first = next(maps)
        (pool,) = first["layout"]["pools"]
        assert (pool["tier"], pool["cells"], first["requests"]) == ("device", 601, [])
        assert set(cells.values()) == {(block_planes.PUBLISHED, 0)}
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            written = answer.iter_lines()  # kept: its end would end the request
            next(written)
            cells, event = next((cells, event) for cells, event in maps if event["requests"])
            (row,) = event["requests"]
            assert (row["status"], row["num_prompt"], row["num_cached"]) == ("running", 100, 99)
            held = {cell for cell, (_, owner) in cells.items() if owner == row["number"]}
            assert len(held) >= row["num_blocks"] > 6
            detail = server.http.get("/kv/request", params={"number": row["number"]}).json()
            table = detail["samples"][0]["tables"][0]
            assert held <= set(table)
            assert detail["hit_end"]["reason"] == "last_token"
            block = server.http.get("/kv/block", params={"pool": 0, "block": table[0]}).json()
            size = first["layout"]["block_size"]
            assert (block["token_ids"], block["holders"], block["is_published"]) == (prompt[:size], 1, True)
            assert block["held_by"] == [{"number": row["number"], "sample": 0, "first_token": 0}]
            assert isinstance(block["text"], str)
        # The client of the answer has left: its blocks are idle or free.
        cells = next(cells for cells, event in islice(maps, 200) if not event["requests"])
        assert cells
        assert {state for state, _ in cells.values()} == {block_planes.PUBLISHED}
        idle = server.http.get("/kv/block", params={"pool": 0, "block": table[0]}).json()
        assert (idle["token_ids"], idle["holders"], idle["held_by"]) == (prompt[:size], 0, [])
        assert idle["unchanged_s"] >= 0
    assert server.http.get("/kv/request", params={"number": row["number"]}).status_code == 404


def test_a_salt_hides_the_text_of_a_block(server: ServerProcess) -> None:
    server.http.post("/reset_prefix_cache")
    salted = {"prompt": [70] * 60, "max_tokens": 1, "cache_salt": "secret"}
    assert server.post("/v1/completions", salted).status_code == 200
    idle = [server.http.get("/kv/block", params={"pool": 0, "block": block}).json() for block in range(1, 601)]
    published = [block for block in idle if block["is_published"]]
    assert published
    assert {block["token_ids"] is None and block["text"] is None for block in published} == {True}


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/kv/block", "pool"),
        ("/kv/block?pool=1&block=1", "pool"),
        ("/kv/block?pool=0&block=0", "block"),
        ("/kv/block?pool=0&block=601", "block"),
        ("/kv/block?pool=0&block=-1", "block"),
        ("/kv/request?number=%C2%B2", "number"),
    ],
)
def test_numbers_that_name_nothing_are_refused(server: ServerProcess, path: str, field: str) -> None:
    refused = server.http.get(path)
    assert (refused.status_code, check_form(refused.text, 400)["param"]) == (400, field)


@pytest.mark.slow
def test_a_server_that_stops_ends_its_watchers(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "log", "--num-kv-blocks", "300") as server:
        with server.http.stream("GET", "/kv/map") as stream:
            lines = stream.iter_lines()
            assert any(line.startswith("data: ") for line in lines)
            server.process.send_signal(signal.SIGTERM)
            assert not any(line.startswith("data: ") for line in lines)
        assert server.process.wait(20) == 0
        assert "Traceback" not in server.log.read_text()
