"""The proxy before real servers: the whole surface, prefixes, sessions, drains, and servers that die."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.process import PATIENCE_S, running
from tests.serving.fleets import FLAGS, FleetProcesses, fleet_of

REPLICA = "x-quire-replica"
GREEDY = {"model": "tiny", "temperature": 0.0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcesses]:
    with fleet_of(folder, tmp_path_factory.mktemp("logs"), 2, "--tenant-header", "x-none") as fleet:
        yield fleet


@pytest.fixture(scope="module")
def fleet(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcesses]:
    with fleet_of(folder, tmp_path_factory.mktemp("logs"), 2, "--pin-limit", "0.5") as fleet:
        yield fleet


@pytest.fixture
def settled(fleet: FleetProcesses) -> FleetProcesses:
    """The fleet with empty caches."""
    assert fleet.http.post("/reset_prefix_cache", json={}).status_code == 200
    fleet.wait_until_settled()
    return fleet


def complete(fleet: FleetProcesses, prompt: str, **fields: Any) -> httpx.Response:
    response = fleet.http.post("/v1/completions", json={**GREEDY, "prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    return response


def expected_hits(fleet: FleetProcesses) -> float:
    """Return the tokens that the proxy expected in caches so far."""
    lines = fleet.http.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("quire_router_expected_hit_tokens_total"))


def test_a_conversation_goes_on_where_it_was_and_its_answers_count(settled: FleetProcesses) -> None:
    text, places, before = "Z" + "tell me more " * 10, [], expected_hits(settled)
    num_cached = 0
    for _ in range(4):
        response = complete(settled, text)
        places.append(response.headers[REPLICA])
        text += response.json()["choices"][0]["text"]
        details = response.json()["usage"]["prompt_tokens_details"]
        num_cached += (details or {}).get("cached_tokens", 0)
        settled.wait_until_settled()
    assert len(set(places)) == 1
    assert num_cached > 400
    assert abs(expected_hits(settled) - before - num_cached) <= 3 * 16, "the proxy knows what the cache has"


def test_different_prompts_are_spread_and_equal_ones_meet(settled: FleetProcesses) -> None:
    prompts = [f"{number} " * 40 for number in range(4)]
    first = [complete(settled, prompt).headers[REPLICA] for prompt in prompts]
    assert len(set(first)) == 2
    settled.wait_until_settled()
    assert [complete(settled, prompt).headers[REPLICA] for prompt in prompts] == first


def test_after_an_eviction_it_is_no_longer_expected(settled: FleetProcesses) -> None:
    prompt = "what was evicted " * 10
    place = complete(settled, prompt).headers[REPLICA]
    settled.wait_until_settled()
    before = expected_hits(settled)
    server = next(server for server in settled.servers if server.url == place)
    server.post("/reset_prefix_cache", {})
    settled.wait_until(lambda state: not state[place]["num_blocks"])
    complete(settled, prompt)
    assert expected_hits(settled) == before


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Zab"}),
        ("/v1/completions", {"prompt": [5, 6, 7, 8] * 20}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "system": "be kind"}),
        ("/v1/responses", {"input": "hello", "instructions": "be kind"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "hello"}], "stream": False}),
        ("/api/generate", {"prompt": "hello", "stream": False}),
    ],
)
def test_every_protocol_is_routed_by_its_own_prompt(settled: FleetProcesses, path: str, body: dict[str, Any]) -> None:
    """A prompt of each protocol is expected where it went before: the tokens are those of its own rendering."""
    options = {"options": {"num_predict": 4, "temperature": 0}} if path.startswith("/api/") else {"temperature": 0}
    limit = {} if path.startswith("/api/") else {"max_output_tokens" if "responses" in path else "max_tokens": 4}
    content = json.loads(json.dumps(body).replace("hello", "hello " * 40).replace("Zab", "Zab" * 40))
    request = {"model": "tiny", **content, **options, **limit}
    first = settled.http.post(path, json=request)
    assert first.status_code == 200, first.text
    settled.wait_until_settled()
    before = expected_hits(settled)
    again = settled.http.post(path, json=request)
    assert again.status_code == 200
    assert again.headers[REPLICA] == first.headers[REPLICA]
    assert expected_hits(settled) > before + 32


def test_the_rest_of_the_surface_passes_through(fleet: FleetProcesses) -> None:
    http = fleet.http
    assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert http.post("/tokenize", json={"prompt": "abc"}).json()["count"] == 4
    assert http.get("/version").json().keys() == {"version"}
    assert "text/html" in http.get("/").headers["content-type"]
    assert http.get("/health").json() == {"status": "ok", "num_replicas": 2, "num_available": 2}
    assert http.get("/nowhere").status_code == 404
    assert http.post("/v1/completions", content=b"{").status_code in (400, 415)
    refused = http.post("/v1/completions", json={**GREEDY, "prompt": "a", "temperature": -1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
    named = http.post("/v1/completions", json={**GREEDY, "prompt": "a"}, headers={"x-request-id": "mine"})
    assert named.headers["x-request-id"] == "mine"
    assert http.post("/v1/completions", content=b"x" * (65 << 20)).status_code == 413
    wrong = http.post("/router/drain", json={"replica": "nobody"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "replica")


def test_a_change_of_all_servers_is_answered_by_the_one_that_refused_it(settled: FleetProcesses) -> None:
    first, second = settled.servers
    pinned = first.http.post("/pin_prefix", json={"name": "mine", "prompt": "pinned by one server " * 10})
    assert pinned.status_code == 200, pinned.text
    answer = settled.http.post("/unpin_prefix", json={"name": "mine"})
    assert (answer.status_code, answer.headers[REPLICA]) == (400, second.url)


def test_a_stream_is_that_of_a_server(settled: FleetProcesses) -> None:
    body = {**GREEDY, "prompt": "Z", "stream": True, "stream_options": {"include_usage": True}}

    def texts(http: httpx.Client) -> tuple[str, int]:
        with http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        chunks = [json.loads(line[6:]) for line in lines[:-1]]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        return text, chunks[-1]["usage"]["completion_tokens"]

    assert texts(settled.http) == texts(settled.servers[0].http)


def test_a_client_that_leaves_ends_its_request_at_the_server(settled: FleetProcesses) -> None:
    body = {**GREEDY, "prompt": "Z", "max_tokens": 3000, "stream": True}
    with settled.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    settled.wait_until_settled()


def test_a_draining_server_gets_no_requests_and_ends_its_own(settled: FleetProcesses) -> None:
    body = {**GREEDY, "prompt": "Z", "max_tokens": 300, "stream": True}
    with settled.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        place = response.headers[REPLICA]
        assert settled.http.post("/router/drain", json={"replica": place}).json()["is_draining"]
        others = {complete(settled, "Z" * number).headers[REPLICA] for number in range(1, 6)}
        assert place not in others
        assert "data: [DONE]" in list(lines)
    settled.http.post("/router/undrain", json={"replica": place})
    assert settled.replicas()[place]["is_available"]


def test_no_server_is_an_answer(tmp_path: Path) -> None:
    from tests.serving.fleets import proxy_before

    with proxy_before([], "http://127.0.0.1:9", tmp_path / "proxy.log") as fleet:
        response = fleet.http.post("/v1/completions", json={**GREEDY, "prompt": "a"})
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == "no_replica"
        assert fleet.http.get("/health").status_code == 503
        assert fleet.process.poll() is None


def stream_all(fleet: FleetProcesses, prompt: str, found: dict[str, Any]) -> None:
    """Stream a long answer and note how it ends."""
    body = {**GREEDY, "prompt": prompt, "max_tokens": 600, "stream": True}
    found["text"], found["error"], found["done"] = "", None, False
    try:
        with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
            found["status"], found["place"] = response.status_code, response.headers.get(REPLICA)
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    found["done"] = True
                elif line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    found["error"] = chunk.get("error", found["error"])
                    found["text"] += "".join(choice["text"] for choice in chunk.get("choices", ()))
                    found["begun"].set()
    finally:
        found["begun"].set()


@pytest.mark.slow
def test_a_killed_server_costs_its_own_streams_an_error_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    with fleet_of(folder, tmp_path, 2) as fleet:
        fleet.wait_until_settled()
        found: list[dict[str, Any]] = [{"begun": threading.Event()} for _ in range(6)]
        prompts = [f"{number}Z" for number in range(6)]
        threads = [
            threading.Thread(target=stream_all, args=(fleet, prompt, each))
            for prompt, each in zip(prompts, found, strict=True)
        ]
        for thread in threads:
            thread.start()
        for each in found:
            assert each["begun"].wait(PATIENCE_S)
        victim = fleet.servers[0]
        victim.stop(signal.SIGKILL)
        # What comes now is answered by the other server, whatever the proxy knows yet.
        assert complete(fleet, "Zlater").headers[REPLICA] == fleet.servers[1].url
        for thread in threads:
            thread.join(PATIENCE_S)
        lost = [each for each in found if each["place"] == victim.url]
        kept = [each for each in found if each["place"] != victim.url]
        assert lost
        assert kept
        assert all(each["error"]["code"] == "replica_lost" and each["done"] for each in lost)
        assert all(each["error"] is None and each["done"] and len(each["text"]) > 500 for each in kept)
        state = fleet.replicas()
        assert not state[victim.url]["is_available"]
        assert fleet.http.get("/health").json()["num_available"] == 1


@pytest.mark.slow
def test_a_restarted_server_has_the_pins_of_the_others(folder: Path, tmp_path: Path) -> None:
    with fleet_of(folder, tmp_path, 2, "--pin-limit", "0.5") as fleet:
        fleet.wait_until_settled()
        pin = {"name": "mine", "prompt": "pinned at every server " * 10}
        assert fleet.http.post("/pin_prefix", json=pin).status_code == 200
        gone = {"name": "gone", "prompt": "pinned for a while " * 10}
        assert fleet.http.post("/pin_prefix", json=gone).status_code == 200
        victim = fleet.servers[0]
        victim.stop(signal.SIGKILL)
        fleet.wait_until(lambda state: not state[victim.url]["is_up"])
        assert fleet.http.post("/unpin_prefix", json={"name": "gone"}).status_code == 200
        flags = (*FLAGS, "--pin-limit", "0.5", "--port", victim.url.rpartition(":")[2])
        with running(folder, tmp_path / "again.log", *flags) as again:
            fleet.wait_until(lambda state: state[victim.url]["is_available"])
            answers = [again.post("/unpin_prefix", {"name": name}).status_code for name in ("mine", "gone")]
    assert answers == [200, 400]
