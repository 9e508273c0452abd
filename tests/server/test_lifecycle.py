"""Keys, queues, and the life of the process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest

from quire.server.http.stop_signals import take_signals
from tests.server.conftest import KEY
from tests.server.dying import DEADLY, PANICKING
from tests.server.process import PATIENCE_S, ServerProcess, running
from tests.server.streams import events_of
from tests.server.test_errors import check_form

LONG: dict[str, Any] = {"prompt": "Z", "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "stream": True}
FLAGS = ("--num-kv-blocks", "300")


def begun(response: httpx.Response) -> tuple[str, Generator[str]]:
    """Return a stream's first chunk and its further lines; closing the lines closes the stream."""
    lines = cast("Generator[str]", response.iter_lines())
    first = next(line for line in lines if line.startswith("data: {"))
    return first, lines


def test_a_full_queue_is_a_429_that_says_when_to_come_back(narrow_server: ServerProcess) -> None:
    narrow_server.wait_until_idle()
    http = narrow_server.http
    with http.stream("POST", "/v1/completions", json=LONG) as one:
        _, held = begun(one)
        narrow_server.wait_until(lambda status: status["engine"]["num_running"] == 1)
        with http.stream("POST", "/v1/completions", json=LONG), http.stream("POST", "/v1/completions", json=LONG):
            narrow_server.wait_until(lambda status: status["engine"]["num_waiting"] == 2)
            for path, body in (
                ("/v1/completions", {"prompt": "a"}),
                ("/v1/completions", {"prompt": "a", "stream": True}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ):
                refused = narrow_server.post(path, body)
                assert refused.status_code == 429
                assert check_form(refused.text, 429)["code"] == "queue_full"
                assert int(refused.headers["retry-after"]) >= 1
            assert http.get("/health").status_code == 200
            held.close()
    narrow_server.wait_until_idle()
    assert narrow_server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    too_many = narrow_server.post("/v1/completions", {"prompt": ["a"] * 3})
    assert (too_many.status_code, check_form(too_many.text, 400)["param"]) == (400, "prompt")


def test_a_refusal_that_takes_long_is_a_status_and_no_event(narrow_server: ServerProcess) -> None:
    narrow_server.wait_until_idle()
    body = {**LONG, "max_tokens": 1000}
    with ThreadPoolExecutor(6) as threads:
        narrow_server.process.send_signal(signal.SIGSTOP)
        try:
            answers = [threads.submit(narrow_server.post, "/v1/completions", body) for _ in range(6)]
            # Pings would come after 0.02 s.
            time.sleep(0.5)
        finally:
            narrow_server.process.send_signal(signal.SIGCONT)
        found = [answer.result() for answer in answers]
    assert {answer.status_code for answer in found} == {200, 429}
    for answer in found:
        if answer.status_code == 200:
            assert events_of(answer.text)[-1] == "[DONE]"
            assert "error" not in answer.text
        else:
            assert check_form(answer.text, 429)["code"] == "queue_full"


@pytest.mark.parametrize("path", ["/kv/map", "/v1/models", "/metrics", "/status", "/kv", "/version", "/v1/nothing"])
@pytest.mark.parametrize("key", [None, "wrong"])
def test_the_key_is_wanted_but_for_health_and_the_page(
    narrow_server: ServerProcess, path: str, key: str | None
) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    response = httpx.get(narrow_server.url + path, headers=headers, timeout=PATIENCE_S)
    assert response.status_code == 401
    assert check_form(response.text, 401)["code"] == "invalid_api_key"
    assert httpx.get(f"{narrow_server.url}/health", timeout=PATIENCE_S).status_code == 200


@pytest.mark.parametrize("path", ["/version/", "//version", "/v1/models/", "/nothing"])
@pytest.mark.parametrize("host", ["evil.example", "[", "evil.example:x", "", "[::1"])
def test_nobody_is_sent_to_a_host_of_the_clients(narrow_server: ServerProcess, path: str, host: str) -> None:
    answer = narrow_server.http.get(f"{narrow_server.url}{path}", headers={"Host": host}, follow_redirects=False)
    assert answer.status_code == 404
    assert check_form(answer.text, 404)["code"] in ("not_found", "model_not_found")


def test_the_openai_client_shows_the_key(narrow_server: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{narrow_server.url}/v1", api_key=KEY, max_retries=0) as client:
        assert client.models.list().data[0].id == "tiny"
    with (
        openai.OpenAI(base_url=f"{narrow_server.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_only_named_origins_may_call_from_a_page(narrow_server: ServerProcess, server: ServerProcess) -> None:
    def ask(asked: ServerProcess, origin: str) -> httpx.Response:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        headers["Access-Control-Request-Headers"] = "authorization,content-type"
        return httpx.options(f"{asked.url}/v1/completions", headers=headers, timeout=PATIENCE_S)

    allowed = ask(narrow_server, "https://example.org")
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://example.org"
    assert "access-control-allow-origin" not in ask(narrow_server, "https://evil.example").headers
    assert "access-control-allow-origin" not in ask(server, "https://example.org").headers


def test_health_metrics_and_version(server: ServerProcess) -> None:
    health = server.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    metrics = server.http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    for name in ("num_requests_running", "kv_cache_usage_perc", "time_to_first_token_seconds", "generation_tokens"):
        assert f"vllm:{name}" in metrics.text
    assert server.http.get("/version").json()["version"] == server.status()["version"]


def test_the_log_says_what_was_resolved_and_what_was_done(server: ServerProcess) -> None:
    server.post("/v1/completions", {"prompt": "a prompt", "max_tokens": 60, "ignore_eos": True})
    server.wait_until(lambda _: "Throughput: prompt" in server.log.read_text())
    log = server.log.read_text()
    assert "Available KV cache memory: " in log
    assert "maximum concurrency for 4,096 tokens per request: " in log
    assert "Traceback" not in log


def test_a_signal_lets_what_runs_finish_and_takes_nothing_new(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "log", *FLAGS, "--drain-timeout", "600", module="quire") as server:
        body = {**LONG, "max_tokens": 1000}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            first, lines = begun(response)
            os.kill(server.process.pid, signal.SIGTERM)
            while server.http.get("/health").json()["status"] != "stopping":
                pass
            health = server.http.get("/health")
            assert health.status_code == 503
            for streamed in (False, True):
                refused = server.post("/v1/completions", {"prompt": "a", "stream": streamed})
                assert refused.status_code == 503
                assert check_form(refused.text, 503)["code"] == "stopping"
                assert refused.headers["retry-after"]
            rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        chunks = [json.loads(first[6:]), *rest]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(PATIENCE_S) == 0
        assert "Traceback" not in (tmp_path / "log").read_text()


def test_shutdown_ends_unfinished_streams_with_an_error(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "log", *FLAGS, "--drain-timeout", "0.1") as server:
        with server.http.stream(
            "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], **LONG}
        ) as response:
            assert response.status_code == 200
            os.kill(server.process.pid, signal.SIGINT)
            raw = response.read().decode()
        *_, error, done = events_of(raw)
        assert done == "[DONE]"
        assert raw.count("[DONE]") == 1
        assert check_form(error, 503)["code"] == "stopping"
        assert server.process.wait(PATIENCE_S) == 0
        assert "Traceback" not in (tmp_path / "log").read_text()


USER = [{"role": "user", "content": "a"}]
PROTOCOLS: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": USER, "max_tokens": 4000, "temperature": 0, "stream": True},
    "/v1/responses": {"input": "a", "max_output_tokens": 4000, "temperature": 0, "stream": True},
    "/api/chat": {"messages": USER, "options": {"num_predict": 4000, "temperature": 0}},
}


@pytest.mark.slow
def test_shutdown_ends_streams_of_other_protocols_with_errors_of_theirs(folder: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(running(folder, tmp_path / "log", *FLAGS, "--drain-timeout", "0.1"))
        streams = [server.http.stream("POST", path, json=body) for path, body in PROTOCOLS.items()]
        responses = [stack.enter_context(stream) for stream in streams]
        os.kill(server.process.pid, signal.SIGINT)
        raw = [response.read().decode() for response in responses]
        last = [json.loads(text.strip().split("\n")[-1].removeprefix("data: ")) for text in raw]
        why = "the server is stopping"
        number = json.loads(raw[1].split("\n\n")[-3].partition("data: ")[2])["sequence_number"] + 1
        assert last == [
            {"type": "error", "error": {"type": "overloaded_error", "message": why}},
            {"type": "error", "code": "stopping", "message": why, "param": None, "sequence_number": number},
            {"error": why},
        ]
        assert raw[0].split("\n")[-4] == raw[1].split("\n")[-4] == "event: error"
        assert server.process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_a_second_signal_ends_at_once(folder: Path, tmp_path: Path) -> None:
    with (
        running(folder, tmp_path / "log", *FLAGS, "--drain-timeout", "600") as server,
        server.http.stream("POST", "/v1/completions", json=LONG) as response,
    ):
        _, held = begun(response)
        os.kill(server.process.pid, signal.SIGTERM)
        while server.http.get("/health").json()["status"] != "stopping":
            pass
        assert server.stop(signal.SIGTERM) == 128 + signal.SIGTERM
        with pytest.raises(httpx.RemoteProtocolError):
            list(held)


@pytest.mark.parametrize("length", [DEADLY, pytest.param(PANICKING, marks=pytest.mark.slow)])
def test_a_server_whose_engine_has_died_says_so_and_ends_with_an_error(
    folder: Path, tmp_path: Path, length: int
) -> None:
    with (
        running(folder, tmp_path / "log", *FLAGS, module="tests.server.dying") as server,
        server.http.stream("POST", "/v1/completions", json=LONG) as response,
    ):
        _, lines = begun(response)
        deadly = server.post("/v1/completions", {"prompt": [5] * length, "max_tokens": 1})
        assert deadly.status_code == 503
        assert check_form(deadly.text, 503)["code"] == "engine_error"
        health = server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "dead")
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 503
        *_, error, done = [line for line in lines if line.startswith("data: ")]
        assert check_form(error.removeprefix("data: "), 503)["code"] == "engine_error"
        assert done == "data: [DONE]"
        assert server.process.wait(PATIENCE_S) == 1
        assert "injected" in server.log.read_text()


@contextmanager
def hangups(handler: signal.Handlers) -> Iterator[None]:
    """Let processes that are started meanwhile inherit what a hangup does to them, whatever the tests inherited."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_a_hangup_stops_the_server_like_a_signal(folder: Path, tmp_path: Path) -> None:
    with (
        hangups(signal.SIG_DFL),
        running(folder, tmp_path / "log", *FLAGS, "--drain-timeout", "600") as server,
        server.http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 1000}) as response,
    ):
        _, lines = begun(response)
        for _ in range(2):
            os.kill(server.process.pid, signal.SIGHUP)
            while server.http.get("/health").json()["status"] != "stopping":
                pass
        assert list(lines)[-2] == "data: [DONE]"
        assert server.process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_a_server_that_was_started_to_outlive_its_terminal_does(folder: Path, tmp_path: Path) -> None:
    with hangups(signal.SIG_IGN), running(folder, tmp_path / "log", *FLAGS, module="quire") as server:
        os.kill(server.process.pid, signal.SIGHUP)
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        assert server.http.get("/health").json()["status"] == "ok"
        assert server.stop() == 0


def test_a_signal_is_not_lost_while_the_event_loop_is_behind() -> None:
    taken: list[int] = []

    async def scenario() -> None:
        take_signals(taken.append)
        loop = asyncio.get_running_loop()
        # More calls from elsewhere than the loop's pipe has room for, and no turn of the loop in between.
        for _ in range(20_000):
            loop.call_soon_threadsafe(int)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            while not taken:
                await asyncio.sleep(0.01)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        asyncio.run(scenario())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert taken == [signal.SIGTERM]


@pytest.mark.slow
def test_pages_of_all_origins_without_a_key_are_worth_a_warning(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "log", *FLAGS, "--allow-origin", "*") as server:
        assert "WARNING --allow-origin '*' without --api-key" in server.log.read_text()
    with running(folder, tmp_path / "log", *FLAGS, "--allow-origin", "*", key=KEY) as server:
        assert "WARNING" not in server.log.read_text()


def refused(*flags: str) -> str:
    """Return what a start says that must fail."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    env.pop("QUIRE_API_KEY", None)
    command = [sys.executable, "-m", "quire", "serve", *flags]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_an_open_address_without_a_key_does_not_start() -> None:
    assert "needs an API key" in refused("--host", "0.0.0.0")


def test_a_taken_port_does_not_start(server: ServerProcess) -> None:
    assert "cannot listen on 127.0.0.1 port" in refused("--port", server.url.rpartition(":")[2])
