"""The end of a server: requests that it waits for, requests that it fails, and failures meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from quire.server.http.connection import Connection, Connections
from quire.server.http.stop_signals import take_signals
from tests.server.failing import FAULT, SHORT_FLUSH, WATCH_FAILS
from tests.server.process import PATIENCE_S, ServerProcess, running
from tests.server.raw import connect, post, read_all

FLAGS = ("--num-kv-blocks", "300")
STREAM: dict[str, Any] = {"prompt": "Z", "max_tokens": 4000, "ignore_eos": True, "stream": True}


def wait_until_stopping(server: ServerProcess) -> httpx.Response:
    """Return the first answer that says that the server is stopping."""
    deadline = time.monotonic() + PATIENCE_S
    while (health := server.http.get("/health")).json()["status"] != "stopping":
        assert time.monotonic() < deadline
    return health


@pytest.mark.slow
def test_an_answer_that_is_being_read_is_waited_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULT, SHORT_FLUSH)
    flags = ("--num-kv-blocks", "600", "--max-num-seqs", "16", "--drain-timeout", "600")
    body = {"prompt": "Z", "max_tokens": 300, "n": 16, "logprobs": 64, "ignore_eos": True}
    with (
        running(folder, tmp_path / "log", *flags, module="tests.server.failing") as server,
        connect(server, receive_buffer=64 << 10) as connection,
    ):
        connection.sendall(post("/v1/completions", body, "Connection: close"))
        server.wait_until(lambda status: bool(status["requests"]))
        # Where the answer has begun the engine has finished; the kernels hold only a part of it.
        begin = connection.recv(1000)
        assert begin.startswith(b"HTTP/1.1 200")
        server.process.send_signal(signal.SIGTERM)
        wait_until_stopping(server)
        time.sleep(3)  # what is waited for behind all answers ends before
        connection.settimeout(PATIENCE_S)
        assert (begin + read_all(connection)).endswith(b"}\r\n0\r\n\r\n")
        assert server.process.wait(PATIENCE_S) == 0
        assert "ERROR" not in server.log.read_text()


@pytest.mark.slow
def test_connections_end_behind_their_answers_once_the_server_stops(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "log", *FLAGS, "--drain-timeout", "600") as server:
        with server.http.stream("POST", "/v1/completions", json={**STREAM, "max_tokens": 1000}) as response:
            assert "connection" not in response.headers
            lines = response.iter_lines()
            next(lines)
            assert "connection" not in server.http.get("/health").headers
            server.process.send_signal(signal.SIGTERM)
            assert wait_until_stopping(server).headers["connection"] == "close"
            assert server.post("/v1/completions", {"prompt": "a"}).headers["connection"] == "close"
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_probes_do_not_keep_a_server_from_stopping(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "log", *FLAGS) as server:
        ended = threading.Event()

        def probe() -> None:
            with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
                while not ended.is_set():
                    try:
                        client.get("/health")
                    except httpx.TransportError:
                        time.sleep(0.01)

        probes = [threading.Thread(target=probe) for _ in range(4)]
        for thread in probes:
            thread.start()
        time.sleep(0.3)
        assert server.stop() == 0
        ended.set()
        for thread in probes:
            thread.join()
        # It says so where it has waited for all that it may.
        assert "timeout graceful shutdown exceeded" not in server.log.read_text()


@pytest.mark.slow
def test_a_server_whose_task_has_failed_says_so_and_ends_with_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULT, WATCH_FAILS)
    with running(folder, tmp_path / "log", *FLAGS, module="tests.server.failing") as server, connect(server) as stream:
        # What runs is finished first.
        stream.sendall(post("/v1/completions", {**STREAM, "max_tokens": 1000}, "Connection: close"))
        assert read_all(stream).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert server.process.wait(PATIENCE_S) == 1
        log = server.log.read_text()
        assert "ERROR a task of the server has failed, so the server ends" in log
        assert "injected" in log


def test_a_failed_connection_check_closes_only_that_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Open:
        def __init__(self, *, fails: bool) -> None:
            self.fails = fails
            self.num_checks = 0
            self.is_closed = False

        def check(self) -> None:
            self.num_checks += 1
            if self.fails:
                raise RuntimeError("injected")

        def abort(self) -> None:
            self.is_closed = True

    connections = Connections(10, 0.01, 0.01, 0.01)
    opened = [Open(fails=number % 2 == 0) for number in range(6)]
    for connection in opened:
        connections.add(cast(Connection, connection))

    async def scenario() -> None:
        watching = asyncio.create_task(connections.watch())
        async with asyncio.timeout(PATIENCE_S):
            while min(connection.num_checks for connection in opened) < 3:
                assert not watching.done()
                await asyncio.sleep(0.001)
        watching.cancel()

    asyncio.run(scenario())
    assert [connection.is_closed for connection in opened] == [True, False] * 3
    assert "injected" in caplog.text


def test_a_hangup_after_the_event_loop_ended_is_ignored() -> None:
    taken: list[int] = []

    async def scenario() -> None:
        take_signals(taken.append)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        asyncio.run(scenario())
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.01)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert taken == []
