"""A server with front processes: what the tests of one process do not have, a death and its replacement."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.process import PATIENCE_S, ServerProcess, running
from tests.server.streams import stream, text_of
from tests.server.test_lifecycle import LONG, begun, refused

FLAGS = ("--num-kv-blocks", "600", "--max-num-seqs", "8", "--api-server-count", "2")


@pytest.fixture(scope="module")
def fronted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with two fronts."""
    with running(folder, tmp_path_factory.mktemp("logs") / "fronts.log", *FLAGS, "--pin-limit", "0.1") as process:
        yield process
        process.http.close()  # a test may have replaced it


def fronts_of(server: ServerProcess) -> set[int]:
    """Return the ids of the front processes."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return {child for child, command in commands.items() if b"front_process" in command}


def test_streams_and_whole_answers_are_equal_on_connections_of_their_own(fronted: ServerProcess) -> None:
    body = {"prompt": "abc", "max_tokens": 24, "temperature": 0, "ignore_eos": True, "n": 2, "logprobs": 2}
    whole = fronted.post("/v1/completions", body).json()
    for _ in range(6):  # some of them reach another front
        with httpx.Client(base_url=fronted.url, timeout=PATIENCE_S) as http:
            assert http.post("/v1/completions", json=body).json()["choices"] == whole["choices"]
    _, chunks = stream(fronted, "/v1/completions", body)
    assert [text_of(chunks, index) for index in range(2)] == [choice["text"] for choice in whole["choices"]]
    fronted.wait_until_idle()


def test_every_front_counts_and_shows_the_requests_of_all(fronted: ServerProcess) -> None:
    def count() -> float:
        text = fronted.http.get("/metrics").text
        found = re.search(r'http_requests_total\{handler="/version",method="GET",status="2xx"\} (\S+)', text)
        return float(found[1]) if found else 0.0

    before = count()
    for _ in range(8):
        assert httpx.get(f"{fronted.url}/version", timeout=PATIENCE_S).status_code == 200
    assert count() == before + 8
    with fronted.http.stream("POST", "/v1/completions", json=LONG) as response:
        _, held = begun(response)
        for _ in range(6):
            status = httpx.get(f"{fronted.url}/status", timeout=PATIENCE_S).json()
            assert len(status["requests"]) == status["engine"]["num_running"] == 1
        held.close()
    fronted.wait_until_idle()


def test_fronts_have_no_torch(fronted: ServerProcess) -> None:
    for process in fronts_of(fronted):
        assert "torch" not in Path(f"/proc/{process}/maps").read_text()


def test_a_dead_front_loses_its_connections_only_and_is_replaced(fronted: ServerProcess) -> None:
    before = fronts_of(fronted)
    assert len(before) == 2
    with fronted.http.stream("POST", "/v1/completions", json=LONG) as response:
        _, held = begun(response)
        victims = set(before)
        for process in victims:
            os.kill(process, signal.SIGKILL)
        with pytest.raises(httpx.HTTPError):
            list(held)
    deadline = time.monotonic() + PATIENCE_S
    while len(fronts_of(fronted) - before) < 2:
        assert time.monotonic() < deadline, fronted.log.read_text()
        time.sleep(0.05)
    # The engine's memory is free again, and the new fronts answer.
    fronted.http.close()
    fronted.http = httpx.Client(base_url=fronted.url, timeout=PATIENCE_S)
    fronted.wait_until_idle()
    assert fronted.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    assert "has ended by signal 9; its connections are lost" in fronted.log.read_text()


@pytest.mark.slow
def test_a_killed_engine_process_leaves_no_front(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "log", *FLAGS) as server:
        fronts = fronts_of(server)
        server.process.kill()
        server.process.wait(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while any(Path(f"/proc/{process}").exists() for process in fronts):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_more_fronts_than_connections_do_not_start() -> None:
    assert "max_connections must be at least api_server_count" in refused(
        "--api-server-count", "3", "--max-connections", "2"
    )
