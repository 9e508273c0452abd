"""The application of Ray Serve on a cluster of one node: the whole surface, the router, kills and rolling updates."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.process import ServerProcess
from tests.server.test_errors import check_form
from tests.serving.ray_apps import (
    GREEDY,
    PATIENCE_S,
    REPLICA,
    RayApp,
    complete,
    content_of,
    in_threads,
    ray_app,
    wait_until_settled,
)
from tests.serving.ray_losses import serve_while_lost

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'quire[ray]'"),
]

NUM_REPLICAS = 2


@pytest.fixture(scope="module")
def options(folder: Path) -> dict[str, Any]:
    """The options of the application; cores are not counted, so that any machine has enough."""
    return {
        "model": str(folder),
        "served_model_name": "tiny",
        "num_replicas": NUM_REPLICAS,
        "num_cpus": 0,
        "num_threads": 1,
        "num_kv_blocks": 300,
        "max_num_seqs": 16,
        "log_interval_s": 0,
    }


@pytest.fixture(scope="module")
def app(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayApp]:
    with ray_app(options, tmp_path_factory.mktemp("logs")) as app:
        yield app


@pytest.fixture
def idle(app: RayApp) -> RayApp:
    """The application with empty caches."""
    assert app.http.post("/reset_prefix_cache", json={}).status_code == 200
    app.wait_until_idle(NUM_REPLICAS)
    return app


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Z"}], "temperature": 0, "max_tokens": 9}
REQUESTS: dict[str, tuple[str, str, Any]] = {
    "completion": ("POST", "/v1/completions", {**GREEDY, "prompt": "aZ"}),
    "completion, stream": ("POST", "/v1/completions", {**GREEDY, "prompt": "bZ", "stream": True}),
    "two prompts": ("POST", "/v1/completions", {**GREEDY, "prompt": ["cZ", "dQ"]}),
    "chat": ("POST", "/v1/chat/completions", CHAT),
    "chat, stream": ("POST", "/v1/chat/completions", {**CHAT, "stream": True}),
    "messages": ("POST", "/v1/messages/count_tokens", CHAT),
    "ollama": ("POST", "/api/show", {"model": "tiny"}),
    "tokenize": ("POST", "/tokenize", {"model": "tiny", "prompt": "abc"}),
    "models": ("GET", "/v1/models/tiny", None),
    "page": ("GET", "/", None),
    "embeddings": ("POST", "/v1/embeddings", {"model": "tiny", "input": "abc"}),
    "no such model": ("POST", "/v1/completions", {**GREEDY, "model": "other", "prompt": "a"}),
    "bad value": ("POST", "/v1/completions", {**GREEDY, "prompt": "a", "temperature": -1}),
    "bad value, Anthropic's form": ("POST", "/v1/messages", {**CHAT, "max_tokens": "many"}),
    "no object": ("POST", "/v1/chat/completions", [1]),
    "too long": ("POST", "/v1/completions", {**GREEDY, "prompt": [5] * 5000}),
    "no such route": ("GET", "/v2/other", None),
    "no such method": ("GET", "/v1/completions", None),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_that_of_one_process(app: RayApp, alone: ServerProcess, name: str) -> None:
    method, path, body = REQUESTS[name]
    given = None if body is None else json.dumps(body)
    headers = {"content-type": "application/json", "x-request-id": "the-same"}
    found = app.http.request(method, path, content=given, headers=headers)
    wanted = alone.http.request(method, path, content=given, headers=headers)
    assert (found.status_code, content_of(found)) == (wanted.status_code, content_of(wanted))
    for header in ("content-type", "x-request-id", "retry-after", "allow"):
        assert found.headers.get(header) == wanted.headers.get(header)


def test_the_ingress_refuses_other_methods_on_its_own_routes(app: RayApp) -> None:
    for method, path, allowed in (
        ("PUT", "/health", "GET, HEAD"),
        ("POST", "/metrics", "GET"),
        ("DELETE", "/router/replicas", "GET"),
    ):
        answer = app.http.request(method, path)
        assert answer.status_code == 405
        assert answer.headers["allow"] == allowed
        assert check_form(answer.text, 405)["code"] == "method_not_allowed"
    assert check_form(app.http.get("/router/nowhere").text, 404)["code"] == "not_found"


def test_metrics_are_of_all_replicas_and_of_the_router(app: RayApp) -> None:
    names = app.wait_until_idle(NUM_REPLICAS)
    complete(app, "mZ")
    lines = app.http.get("/metrics").text.splitlines()
    for name in names:
        assert any(line.startswith("vllm:generation_tokens_total") and f'replica="{name}"' in line for line in lines)
    assert any(line.startswith("quire_router_requests_total") and 'end="answered"' in line for line in lines)
    assert app.http.get("/health").json() == {"status": "ok", "num_replicas": NUM_REPLICAS}


def test_a_client_that_leaves_ends_its_request(idle: RayApp) -> None:
    body = {**GREEDY, "prompt": "leaving Z", "max_tokens": 3000, "stream": True}
    with idle.http.stream("POST", "/v1/completions", json=body) as response:
        name = response.headers[REPLICA]
        next(response.iter_lines())
    state = idle.wait_until_idle(NUM_REPLICAS)
    deadline = time.monotonic() + PATIENCE_S
    while num_running(idle, name):
        assert time.monotonic() < deadline, f"the engine runs it still: {state}"
        time.sleep(0.1)


def num_running(app: RayApp, name: str) -> float:
    """Return the number of sequences that a replica runs."""
    for line in app.http.get("/metrics").text.splitlines():
        if line.startswith("vllm:num_requests_running{") and f'replica="{name}"' in line:
            return float(line.split()[-1])
    raise AssertionError(f"there are no metrics of {name}")


def test_a_conversation_goes_on_where_it_was_and_its_answers_count(idle: RayApp) -> None:
    text = "the first turn of a conversation Z"
    first = complete(idle, text)
    answer = first.json()["choices"][0]["text"]
    wait_until_settled(idle)
    second = complete(idle, text + answer + " and more")
    assert second.headers[REPLICA] == first.headers[REPLICA]
    usage = second.json()["usage"]
    num_first = first.json()["usage"]["total_tokens"]
    # Whole blocks of prompt and answer, without the last token, whose KV was not computed.
    assert usage["prompt_tokens_details"]["cached_tokens"] >= (num_first - 1) // 16 * 16


def make_level(app: RayApp) -> None:
    """Send prompts until all replicas have been given as many tokens: equal ones are then used in turn."""
    for number in itertools.count(20):
        totals = [each["computed_tokens"] for each in wait_until_settled(app).values()]
        behind = max(totals) - min(totals)
        if not behind:
            return
        body = {"prompt": [number] * min(behind, 1000), "max_tokens": 1}
        assert app.http.post("/v1/completions", json=body).status_code == 200


def test_the_router_decides_as_the_core_does_with_the_same_events(idle: RayApp) -> None:
    """A twin of the core follows the same publishers, and is told of the same requests."""
    import asyncio

    from quire.fleet.kv_events.subscriber import KVEventSubscriber
    from quire.fleet.routing.router import Router, RouteRequest

    async def run() -> None:
        twin = Router()
        await asyncio.to_thread(make_level, idle)
        # Totals count where replicas are equal otherwise: the twin starts with those of the router.
        state = await asyncio.to_thread(wait_until_settled, idle)
        tasks = []
        for name, each in state.items():
            twin.add_replica(name)
            twin.load_of(name).computed_tokens = each["computed_tokens"]
            twin.set_available(name, True)
            source = each["kv_events"]
            apply = lambda seq, events, is_replay, name=name: twin.apply(name, seq, events, is_replay=is_replay)  # noqa: E731
            seq = lambda name=name: twin.feeds[name].next_seq  # noqa: E731
            subscriber = KVEventSubscriber(source["endpoint"], source["replay_endpoint"], apply, seq)
            tasks.append(asyncio.create_task(subscriber.run()))
        places: list[str] = []
        contexts = [[number + 5] * 40 for number in range(4)]
        for turn in range(16):
            context = contexts[turn % 4]
            state = await asyncio.to_thread(wait_until_settled, idle)
            while any(twin.feeds[name].next_seq != each["next_seq"] for name, each in state.items()):
                await asyncio.sleep(0.05)
            request = RouteRequest(context, session=str(turn % 4) if turn % 3 else None)
            route = twin.route(request, 0.0)
            assert route is not None
            headers = {} if request.session is None else {"x-session-id": request.session}
            body = {"prompt": context, "max_tokens": 9, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            answer = await asyncio.to_thread(idle.http.post, "/v1/completions", json=body, headers=headers)
            assert answer.headers[REPLICA] == route.replica, f"turn {turn}: {twin.rank(request, 0.0)}"
            twin.end(route)
            places.append(route.replica)
            context += [*answer.json()["choices"][0]["token_ids"], turn + 3]
        assert len(set(places)) == NUM_REPLICAS
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_a_killed_replica_costs_its_own_streams_an_error_and_no_request_its_answer(idle: RayApp) -> None:
    state = idle.wait_until_idle(NUM_REPLICAS)

    def kill(places: Mapping[int, str]) -> str:
        os.kill(state[places[0]]["pid"], signal.SIGKILL)
        return places[0]

    victim = serve_while_lost(idle, kill)
    # Those that were on it have their answer from the other one, and Serve has started another.
    state = idle.wait_until_idle(NUM_REPLICAS)
    assert victim not in state
    assert complete(idle, "afterwards Z").headers[REPLICA] in state


def test_a_rolling_update_under_load_fails_no_request(idle: RayApp, options: dict[str, Any]) -> None:
    is_over = threading.Event()
    counts = [0] * 4

    def ask(number: int) -> None:
        with httpx.Client(base_url=idle.url, timeout=PATIENCE_S) as http:
            while not is_over.is_set():
                body = {**GREEDY, "prompt": f"{number} {counts[number]} Z", "max_tokens": 60, "stream": number % 2 == 0}
                answer = http.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                assert '"error"' not in answer.text, answer.text[-500:]
                assert "length" in answer.text
                counts[number] += 1

    before = set(idle.wait_until_idle(NUM_REPLICAS))
    with in_threads(ask, 4) as wrong:
        try:
            while min(counts) < 2 and not wrong:
                time.sleep(0.1)
            idle.deploy({**options, "max_num_seqs": 12})
            done = list(counts)
            while any(now < then + 2 for now, then in zip(counts, done, strict=True)) and not wrong:
                time.sleep(0.1)
        finally:
            is_over.set()
    assert not wrong
    after = set(idle.wait_until_idle(NUM_REPLICAS))
    assert not before & after


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            _, _, after = stat.read_text().rpartition(")")
            if int(after.split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def test_a_replica_of_several_ranks_is_replaced_when_a_rank_dies(idle: RayApp, options: dict[str, Any]) -> None:
    wanted = complete(idle, "ranks Z").json()["choices"][0]["text"]
    idle.deploy({**options, "num_replicas": 1, "num_cpus": 1, "tensor_parallel_size": 2, "dtype": "float32"})
    (name,) = idle.wait_until_idle(1)
    assert complete(idle, "ranks Z").json()["choices"][0]["text"] == wanted
    pid = idle.replicas()[name]["pid"]
    (rank,) = [each for each in children_of(pid) if b"rank_process" in Path(f"/proc/{each}/cmdline").read_bytes()]
    os.kill(rank, signal.SIGKILL)
    idle.wait_until(lambda state: len(state) == 1 and name not in state)
    assert complete(idle, "ranks Z").json()["choices"][0]["text"] == wanted


def test_sequences_that_run_start_another_replica(app: RayApp, options: dict[str, Any]) -> None:
    app.deploy({**options, "num_replicas": 1, "max_replicas": 2, "target_running": 1})
    is_over = threading.Event()

    def ask(number: int) -> None:
        for turn in itertools.count(5):
            if is_over.is_set():
                return
            body = {**GREEDY, "prompt": [number + 5, turn % 50] * 20, "max_tokens": 1000}
            assert httpx.post(f"{app.url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 200

    (name,) = app.wait_until_idle(1)
    with in_threads(ask, 4) as wrong:
        try:
            state = app.wait_until(lambda state: bool(wrong) or len(state) == 2)
            app.wait_until(lambda state: bool(wrong) or all(each["computed_tokens"] for each in state.values()))
        finally:
            is_over.set()
    assert not wrong
    assert name in state
