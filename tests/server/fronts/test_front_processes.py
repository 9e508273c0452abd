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
            again = http.post("/v1/completions", json=body).json()
            # A prompt that is cached is computed in other shapes, which may round otherwise.
            for one, other in zip(again["choices"], whole["choices"], strict=True):
                assert (one["index"], one["text"], one["finish_reason"]) == (other["index"], other["text"], "length")
                assert one["logprobs"]["tokens"] == other["logprobs"]["tokens"]
                found, wanted = one["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"]
                assert found == pytest.approx(wanted, abs=1e-3)
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
    wait_for_fronts(fronted, before)
    # The engine's memory is free again, and the new fronts answer.
    fronted.http.close()
    fronted.http = httpx.Client(base_url=fronted.url, timeout=PATIENCE_S)
    fronted.wait_until_idle()
    assert fronted.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    assert "has ended by signal 9; its connections are lost" in fronted.log.read_text()


def front_of(server: ServerProcess, response: httpx.Response) -> int:
    """Return the id of the front process that has the connection of a response."""
    _, port = response.extensions["network_stream"].get_extra_info("client_addr")[:2]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (inode,) = (row[9] for row in rows if row[2].endswith(f":{port:04X}"))
    (found,) = (
        front
        for front in fronts_of(server)
        if any(os.readlink(each) == f"socket:[{inode}]" for each in Path(f"/proc/{front}/fd").iterdir())
    )
    return found


def wait_for_fronts(server: ServerProcess, without: set[int]) -> None:
    """Wait until there are two fronts, none of which is one of `without`."""
    deadline = time.monotonic() + PATIENCE_S
    while len(fronts := fronts_of(server)) != 2 or fronts & without:
        assert time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.05)


@pytest.mark.slow
def test_a_hung_front_is_replaced_while_the_other_serves(fronted: ServerProcess) -> None:
    with (
        httpx.Client(base_url=fronted.url, timeout=PATIENCE_S) as http,
        http.stream("POST", "/v1/completions", json=LONG) as response,
    ):
        _, held = begun(response)
        hung = front_of(fronted, response)
        os.kill(hung, signal.SIGSTOP)
        # A new connection is taken by the front that runs.
        for _ in range(4):
            assert httpx.get(f"{fronted.url}/version", timeout=PATIENCE_S).status_code == 200
        with pytest.raises(httpx.HTTPError):
            list(held)
    wait_for_fronts(fronted, {hung})
    fronted.http.close()
    fronted.http = httpx.Client(base_url=fronted.url, timeout=PATIENCE_S)
    fronted.wait_until_idle()
    assert fronted.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    assert re.search(r"front \d+ hangs: it has not answered for \d+\.\d s, so it is killed", fronted.log.read_text())


@pytest.mark.slow
def test_fronts_call_a_hung_engine_stuck(fronted: ServerProcess) -> None:
    def status() -> tuple[int, str]:
        answer = fronted.http.get("/health")
        return answer.status_code, answer.json()["status"]

    assert status() == (200, "ok")
    fronts = fronts_of(fronted)
    os.kill(fronted.process.pid, signal.SIGSTOP)
    try:
        for _ in range(3):  # once after the time limit of a call, then at once
            assert status() == (503, "stuck")
        assert fronted.http.get("/version").status_code == 200
    finally:
        os.kill(fronted.process.pid, signal.SIGCONT)
    deadline = time.monotonic() + PATIENCE_S
    while status() != (200, "ok"):
        assert time.monotonic() < deadline
    # The engine's process does not take its own silence for theirs.
    assert fronts_of(fronted) == fronts


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
