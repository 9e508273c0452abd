"""The router's HTTP edge: uploads, bodies that are refused, pages of other origins, and its end."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.process import PATIENCE_S, ServerProcess, running
from tests.server.raw import body_of, connect, post, read_answer, status_of
from tests.server.test_errors import check_form
from tests.server.uploads import check_unfinished_bodies
from tests.serving.fleets import router_before

MAX_BODY = 1 << 20
LIMIT = ("--max-body-bytes", "1MiB")
FLAGS = ("--num-kv-blocks", "300", "--log-interval", "0")
STREAM: dict[str, Any] = {"prompt": "Z", "max_tokens": 4000, "ignore_eos": True, "stream": True}
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The server behind all routers, for short bodies."""
    with running(folder, tmp_path_factory.mktemp("logs") / "server.log", *FLAGS, *LIMIT) as process:
        yield process


@pytest.fixture(scope="module")
def router(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A router for short bodies."""
    with router_before(server, tmp_path_factory.mktemp("logs") / "router.log", *LIMIT) as process:
        yield process


def resident(server: ServerProcess) -> int:
    """Return the bytes of a process in memory."""
    fields = Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii").partition("VmRSS:")[2]
    return int(fields.split()[0]) << 10


def test_unfinished_bodies_have_a_bound_together(router: ServerProcess) -> None:
    check_unfinished_bodies(router, MAX_BODY)


@pytest.mark.slow
def test_many_long_unfinished_bodies_do_not_stay_in_memory(server: ServerProcess, tmp_path: Path) -> None:
    part = post(COMPLETIONS, b"x" * (8 << 20))[:-10]
    with router_before(server, tmp_path / "log", "--max-body-bytes", str(8 << 20)) as router:
        before = resident(router)
        with ExitStack() as stack:
            connections: list[socket.socket] = []
            for _ in range(140):
                connections.append(stack.enter_context(connect(router)))
                connections[-1].sendall(part)
            # The first to stand still are ended; 32 bodies are on their way, and each may be copied once.
            for connection in connections[:100]:
                assert check_form(body_of(read_answer(connection)), 503)["code"] == "too_many_uploads"
            assert resident(router) < before + (600 << 20)
        deadline = time.monotonic() + PATIENCE_S
        while resident(router) > before + (64 << 20):
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.parametrize("path", ["/router/drain", "/router/undrain"])
@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_page_of_another_origin_can_drain_nothing(
    router: ServerProcess, server: ServerProcess, path: str, content_type: str
) -> None:
    headers = {"origin": "http://evil.example", "content-type": content_type}
    body = json.dumps({"replica": server.url})
    answer = router.http.post(path, content=body, headers={key: value for key, value in headers.items() if value})
    assert check_form(answer.text, 415)["code"] == "unsupported_media_type"
    assert not router.http.get("/router/replicas").json()["replicas"][0]["is_draining"]


BODIES = {
    "not JSON": b"{",
    "no object": b"[]",
    "not UTF-8": b'{"prompt": "\xff"}',
    "deep": b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "a level too many": b'{"a":' + b"[" * 200 + b"]" * 200 + b"}",
    "a long integer": b'{"seed": ' + b"9" * 5000 + b"}",
    "many values": b'{"a":[' + b"{}," * 300_000 + b"{}]}",
    "too long": b"x" * (MAX_BODY + 1),
}


@pytest.mark.parametrize("raw", BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/messages", "/api/chat"])
def test_a_body_is_refused_as_by_the_server(
    router: ServerProcess, server: ServerProcess, path: str, raw: bytes
) -> None:
    headers = {"content-type": "application/json"}
    routed, direct = (target.http.post(path, content=raw, headers=headers) for target in (router, server))
    assert routed.status_code in (400, 413)
    assert (routed.status_code, routed.json()) == (direct.status_code, direct.json())


@pytest.mark.parametrize("raw", [raw for raw in BODIES.values() if len(raw) <= MAX_BODY])
def test_the_routers_own_routes_refuse_bodies_as_a_server_does(router: ServerProcess, raw: bytes) -> None:
    answer = router.http.post("/router/drain", content=raw, headers={"content-type": "application/json"})
    assert check_form(answer.text, 400)["code"] == "invalid_json"


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/metrics", "/router/replicas", "/v1/models", COMPLETIONS])
@pytest.mark.parametrize("method", ["CONNECT", "PUT", "TRACE", "ODD"])
def test_other_methods_are_refused_with_a_whole_answer(
    router: ServerProcess, server: ServerProcess, method: str, path: str
) -> None:
    """A success of CONNECT would have no body, and the connection would carry other bytes after it."""
    for target in (router, server):
        with connect(target) as connection:
            connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
            answer = read_answer(connection)
        status = 404 if target is server and "/router/" in path else 405
        assert status_of(answer) == status, (target.url, answer)
        check_form(body_of(answer), status)


def test_the_routers_own_routes_name_their_methods(router: ServerProcess) -> None:
    assert router.http.put("/health").headers["allow"] == "GET, HEAD"
    assert router.http.get("/router/drain").headers["allow"] == "POST"
    assert router.http.head("/health").status_code == 200
    assert router.http.get("/router/nowhere").status_code == 404


def test_a_health_query_is_not_held_up_by_the_parsing_of_bodies(router: ServerProcess) -> None:
    """Bodies that take long to parse are not parsed on the event loop, where this one would take seconds."""
    raw = b'{"a":[' + b'{"a":{}},' * 110_000 + b"{}]}"
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(router)) for _ in range(4)]
        for connection in connections:
            connection.sendall(post(COMPLETIONS, raw))
        assert router.http.get("/health").status_code == 200
        for connection in connections:
            assert status_of(read_answer(connection)) == 400


# ---- its end ----


def next_events(lines: Iterator[str], count: int) -> None:
    """Read some events of a stream."""
    for _ in range(count):
        while not next(lines).startswith("data: "):
            pass


def wait_until_stopping(router: ServerProcess) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while router.http.get("/health").json()["status"] != "stopping":
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_stop_lets_requests_end_and_refuses_new_ones(server: ServerProcess, tmp_path: Path, number: int) -> None:
    with router_before(server, tmp_path / "log") as router:
        with router.http.stream("POST", COMPLETIONS, json={**STREAM, "max_tokens": 800}) as response:
            lines = response.iter_lines()
            next_events(lines, 3)
            router.process.send_signal(number)
            wait_until_stopping(router)
            for path in (COMPLETIONS, "/tokenize", "/reset_prefix_cache"):
                answer = router.post(path, {"prompt": "a"})
                assert check_form(answer.text, 503)["code"] == "stopping"
                assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
            assert router.http.get("/router/replicas").json()["replicas"][0]["num_in_flight"] == 1
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert router.process.wait(PATIENCE_S) == 0
        assert "ERROR" not in router.log.read_text()
        server.wait_until_idle()


def test_at_the_end_of_the_time_for_it_a_stream_ends_with_an_error(server: ServerProcess, tmp_path: Path) -> None:
    with router_before(server, tmp_path / "log", "--drain-timeout", "0.2") as router:
        with router.http.stream("POST", COMPLETIONS, json=STREAM) as response:
            lines = response.iter_lines()
            next_events(lines, 3)
            router.process.send_signal(signal.SIGTERM)
            *_, error, done = [line for line in lines if line]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "stopping"
        assert done == "data: [DONE]"
        assert router.process.wait(PATIENCE_S) == 0
        assert "ERROR" not in router.log.read_text()
        server.wait_until_idle()


@pytest.mark.slow
def test_a_second_signal_ends_the_router_at_once(server: ServerProcess, tmp_path: Path) -> None:
    with router_before(server, tmp_path / "log", "--drain-timeout", "600") as router:
        with router.http.stream("POST", COMPLETIONS, json=STREAM) as response:
            lines = response.iter_lines()
            next_events(lines, 3)
            router.process.send_signal(signal.SIGTERM)
            wait_until_stopping(router)
            router.process.send_signal(signal.SIGTERM)
            assert router.process.wait(PATIENCE_S) == 128 + signal.SIGTERM
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        server.wait_until_idle()
