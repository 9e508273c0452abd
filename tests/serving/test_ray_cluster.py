"""The application of Ray Serve on a cluster of several nodes: raylets on one host, each at an address of its own."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.server.process import ServerProcess
from tests.serving.ray_apps import (
    GREEDY,
    PATIENCE_S,
    REPLICA,
    RayApp,
    complete,
    content_of,
    free_port,
    in_threads,
    ray_app,
    wait_until_settled,
)
from tests.serving.ray_losses import serve_while_lost

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'quire[ray]'"),
]

# Ray takes 127.0.0.1 for the address that it finds for the host.
HEAD, SECOND, WITH_GPU, LATER = (f"127.0.0.{number}" for number in (2, 3, 4, 5))
# Resources that exist on some nodes only: `front` where an ingress may run.
NODES: list[dict[str, Any]] = [
    {"node_ip_address": HEAD, "num_cpus": 2, "resources": {"head": 1, "front": 1}},
    {"node_ip_address": SECOND, "num_cpus": 2, "resources": {"front": 1}},
    # Ray believes what a node claims: there is no GPU.
    {"node_ip_address": WITH_GPU, "num_cpus": 0, "num_gpus": 1},
]
ON_HEAD: list[dict[str, Any]] = [{"name": "Ingress", "ray_actor_options": {"num_cpus": 0, "resources": {"head": 0.1}}}]


@pytest.fixture(scope="module")
def options(folder: Path) -> dict[str, Any]:
    return {
        "model": str(folder),
        "served_model_name": "tiny",
        "num_replicas": 2,
        "num_cpus": 1,
        "num_kv_blocks": 300,
        "max_num_seqs": 16,
        "log_interval_s": 0,
        "kv_events_host": "0.0.0.0",
    }


@pytest.fixture(scope="module")
def other_port() -> int:
    """The port of the proxies on other nodes than the head: all nodes are this host."""
    return free_port()


@pytest.fixture(scope="module")
def app(options: dict[str, Any], other_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayApp]:
    env = {
        "RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(other_port),
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
        "RAY_SERVE_SLOW_STARTUP_WARNING_S": "10",
    }
    logs = tmp_path_factory.mktemp("logs")
    with ray_app(options, logs, nodes=NODES, deployments=ON_HEAD, more_env=env) as app:
        yield app


def test_replicas_on_two_nodes_answer_as_one_process_does(app: RayApp, alone: ServerProcess) -> None:
    state = app.wait_until_idle(2)
    assert {each["node_ip"] for each in state.values()} == {HEAD, SECOND}
    places: set[str] = set()
    for number in range(8):
        body = {**GREEDY, "prompt": f"{number}Z", "stream": number % 2 == 0}
        found, wanted = (each.http.post("/v1/completions", json=body) for each in (app, alone))
        assert (found.status_code, content_of(found)) == (200, content_of(wanted))
        places.add(state[found.headers[REPLICA]]["node_ip"])
    assert places == {HEAD, SECOND}


def test_hits_are_found_on_the_node_that_has_them(app: RayApp) -> None:
    """The ingress on the head follows the events of the other node at that node's address."""
    assert app.http.post("/reset_prefix_cache", json={}).status_code == 200
    wait_until_settled(app)
    contexts = {number: [number + 5] * 80 for number in range(4)}
    places: dict[int, str] = {}
    for turn in range(3):
        for number, context in contexts.items():
            body = {**GREEDY, "prompt": context, "max_tokens": 9, "return_token_ids": True}
            answer = app.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            choice, usage = answer.json()["choices"][0], answer.json()["usage"]
            if turn:
                assert answer.headers[REPLICA] == places[number]
                # Whole blocks of the last turn, without its last token, whose KV was not computed.
                assert usage["prompt_tokens_details"]["cached_tokens"] >= (len(context) - turn - 1) // 16 * 16
            places[number] = answer.headers[REPLICA]
            context += [*choice["token_ids"], number + 50]
        state = wait_until_settled(app)
    assert set(places.values()) == set(state)
    for each in state.values():
        assert each["events"] == "synced"
        assert each["kv_events"]["endpoint"].startswith("tcp://0.0.0.0:")
        assert each["num_blocks"] >= 5


def test_a_lost_node_costs_its_streams_an_error_and_no_request_its_answer(app: RayApp) -> None:
    """Its raylet is killed, and its processes end. Another replica starts where cores are left."""
    assert app.http.post("/reset_prefix_cache", json={}).status_code == 200
    state = wait_until_settled(app)
    (victim,) = [name for name, each in state.items() if each["node_ip"] == SECOND]

    def kill_node(places: Mapping[int, str]) -> str:
        assert set(places.values()) == set(state)
        app.tell({"kill": 1})
        app.expect("killed")
        return victim

    serve_while_lost(app, kill_node)
    state = app.wait_until_idle(2)
    assert victim not in state
    assert {each["node_ip"] for each in state.values()} == {HEAD}
    assert complete(app, "afterwards Z").headers[REPLICA] in state
    app.tell({"add": {**NODES[1], "node_ip_address": LATER}})
    app.expect("added")


def test_two_ingresses_lose_no_request_and_no_hit(app: RayApp, options: dict[str, Any], other_port: int) -> None:
    """Each node has a proxy, which prefers the ingress of its node."""
    ingress = {
        "name": "Ingress",
        "ray_actor_options": {"num_cpus": 0, "resources": {"front": 0.1}},
        "max_replicas_per_node": 1,
    }
    app.deploy({**options, "num_ingress": 2}, [ingress])
    other = RayApp(app.process, f"http://127.0.0.1:{other_port}", app.log)
    other.wait_until_up()
    fronts = [app, other]
    for front in fronts:
        wait_until_settled(front)
    counts = router_requests(app)
    assert len(counts) == 2

    def ask(number: int) -> None:
        for turn in range(8):
            body = {**GREEDY, "prompt": f"{number} {turn} Z", "stream": turn % 2 == 0}
            answer = httpx.post(f"{fronts[number % 2].url}/v1/completions", json=body, timeout=PATIENCE_S)
            assert answer.status_code == 200, answer.text
            assert "length" in answer.text
            assert '"error"' not in answer.text

    with in_threads(ask, 6) as wrong:
        pass
    assert not wrong
    # Each ingress tells the counters of both.
    after = router_requests(app)
    assert after == router_requests(other)
    ends = [after[name] - counts[name] for name in counts]
    # A client that closes its connection at the last byte may count as one that has left.
    assert [each["answered"] + each["left"] for each in ends] == [24, 24], ends
    assert all(each.keys() <= {"answered", "left"} for each in ends), ends
    context, places = [77] * 80, set()
    for turn in range(4):
        for front in fronts:
            wait_until_settled(front)
        body = {**GREEDY, "prompt": context, "max_tokens": 9, "return_token_ids": True, "prompt_cache_key": "session"}
        answer = fronts[turn % 2].http.post("/v1/completions", json=body)
        found = answer.json()
        places.add(answer.headers[REPLICA])
        if turn:
            cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= (len(context) - 2) // 16 * 16
        context += [*found["choices"][0]["token_ids"], turn + 50]
    assert len(places) == 1
    other.http.close()


def router_requests(app: RayApp) -> dict[str, Counter[str]]:
    """Return how many requests over each ingress ended in which way, by its name."""
    counts: dict[str, Counter[str]] = {}
    for family in text_string_to_metric_families(app.http.get("/metrics").text):
        for each in family.samples:
            if each.name.startswith("quire_router_"):
                ends = counts.setdefault(each.labels["ingress"], Counter())
                if each.name == "quire_router_requests_total":
                    ends[each.labels["end"]] += int(each.value)
    return counts


def test_long_prompts_that_wait_start_a_replica_which_ends_after_the_work(app: RayApp, options: dict[str, Any]) -> None:
    scaled = {"num_replicas": 1, "max_replicas": 2, "target_queued_tokens": 2000, "target_running": 1000}
    delays = {"upscale_delay_s": 1, "downscale_delay_s": 2}
    app.deploy({**options, **scaled, **delays, "max_num_seqs": 2}, ON_HEAD)
    is_enough, is_over = threading.Event(), threading.Event()
    num_done = [0] * 8

    def ask(number: int) -> None:
        for turn in itertools.count(5):
            if is_over.is_set() or (is_enough.is_set() and number > 1):
                return
            length = 40 if is_enough.is_set() else 1500
            body = {**GREEDY, "prompt": [number + 5, turn % 50] * (length // 2), "max_tokens": 400, "stream": True}
            answer = httpx.post(f"{app.url}/v1/completions", json=body, timeout=PATIENCE_S)
            assert answer.status_code == 200, answer.text
            assert '"error"' not in answer.text, answer.text[-500:]
            assert "length" in answer.text
            num_done[number] += 1

    (first,) = app.wait_until_idle(1)
    with in_threads(ask, len(num_done)) as wrong:
        try:
            state = app.wait_until(lambda state: bool(wrong) or len(state) == 2)
            app.wait_until(lambda state: bool(wrong) or all(each["computed_tokens"] for each in state.values()))
            # Two short requests at a time go on while the number falls.
            is_enough.set()
            app.wait_until(lambda state: bool(wrong) or len(state) == 1)
        finally:
            is_enough.set()
            is_over.set()
    assert not wrong
    assert first in state
    assert all(num_done)
    app.wait_until_idle(1)


def test_a_replica_with_a_gpu_is_where_ray_has_one(app: RayApp, options: dict[str, Any]) -> None:
    on_gpu = {**options, "num_replicas": 1, "num_cpus": 0, "num_threads": 1, "num_gpus": 1}
    app.deploy(on_gpu, ON_HEAD)
    (state,) = app.wait_until_idle(1).values()
    assert state["node_ip"] == WITH_GPU
    assert complete(app, "a GPU that is only claimed Z").headers[REPLICA] == state["replica"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_fails_the_application_with_the_reason(app: RayApp, options: dict[str, Any]) -> None:
    on_gpu = {**options, "num_replicas": 1, "num_cpus": 0, "num_threads": 1, "num_gpus": 1, "device": "cuda"}
    app.tell({"deploy": on_gpu, "deployments": ON_HEAD})
    status = json.loads(app.expect("{"))
    assert status["status"] == "DEPLOY_FAILED"
    assert "ConfigError" in status["message"]
    assert "PyTorch finds no CUDA GPU" in status["message"]


def test_ranks_that_no_node_has_room_for_wait_with_a_message(app: RayApp, options: dict[str, Any]) -> None:
    """Two nodes have the cores together; the ranks of a replica are on one."""
    wide = {**options, "num_replicas": 1, "num_cpus": 2, "tensor_parallel_size": 2}
    app.tell({"deploy": wide, "deployments": ON_HEAD, "until": "to be scheduled"})
    status = json.loads(app.expect("{"))
    assert status["status"] == "DEPLOYING"
    assert "Resources required for each replica" in status["message"]
