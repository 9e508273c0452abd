"""`quire serve --replicas`: servers on this machine behind one address, and what becomes of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.fleet.local.restarts import HEALTHY_S, LONGEST_DELAY_S, MAX_FAILED_STARTS, Restarts
from tests.server.process import PATIENCE_S
from tests.server.streams import events_of
from tests.serving.processes import ProcessTree
from tests.serving.small_server import FAILING

ROOT = Path(__file__).parents[2]
LONG: dict[str, Any] = {"model": "tiny", "prompt": "Z", "temperature": 0, "ignore_eos": True, "stream": True}


class RunningFleet:
    """A running `quire serve --replicas`."""

    def __init__(self, process: subprocess.Popen[str], tree: ProcessTree, log: Path) -> None:
        self.process = process
        self.tree = tree
        self._log = log
        self.url = ""

    def wait_until_it_serves(self) -> httpx.Client:
        """Return a client, once the front takes requests."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        match = re.search(r"Quire routes to \d servers at (http://\S+)", said)
        assert match, f"it said {said!r} and logged:\n{self.log()}"
        self.url = match[1]
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def log(self) -> str:
        return self._log.read_text()

    def wait_for_log(self, words: str) -> None:
        wait_until(lambda: words in self.log())

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and return the exit code; no process may be left."""
        self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        assert self.tree.wait_until_ended(5.0) == []
        return code


def wait_until(is_so: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@contextmanager
def fleet(folder: Path, log: Path, *flags: str, module: str = "quire") -> Iterator[RunningFleet]:
    """Start servers, small ones by `tests.serving.small_fleet`, and end them afterwards."""
    tree = ProcessTree()
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", **tree.environ}
    command = [sys.executable, "-m", module, "serve", str(folder), "--port", "0", *flags]
    if "--config" not in flags:
        command += ["--replicas", "2"]
    command += ["--num-kv-blocks", "300", "--served-model-name", "tiny", "--log-interval", "0"]
    # What is ignored here, as in a shell's background job, would be ignored there.
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        with log.open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=env, text=True)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    with process:
        try:
            yield RunningFleet(process, tree, log)
        finally:
            process.kill()
            tree.kill()


SMALL = "tests.serving.small_fleet"


def pids_of(http: httpx.Client) -> dict[str, int]:
    """Return the process ids of the servers that take requests, by their addresses."""
    replicas = http.get("/router/replicas").json()["replicas"]
    pids = {}
    for url in (replica["url"] for replica in replicas if replica["is_available"]):
        with suppress(httpx.ConnectError):  # the router has not noticed yet that it has ended
            pids[url] = int(httpx.get(url, timeout=PATIENCE_S).json()["pid"])
    return pids


# ---- when servers start again ----


def test_delays_double_until_a_server_was_healthy() -> None:
    restarts = Restarts()
    assert [restarts.delay_s(0.0) for _ in range(7)] == [1, 2, 4, 8, 16, LONGEST_DELAY_S, LONGEST_DELAY_S]
    assert restarts.delay_s(HEALTHY_S - 1) == LONGEST_DELAY_S
    assert restarts.delay_s(HEALTHY_S) == 1
    assert restarts.delay_s(1.0) == 2


def test_only_failed_starts_in_a_row_are_given_up() -> None:
    restarts = Restarts()
    for _ in range(3):
        assert None not in [restarts.delay_s(None) for _ in range(MAX_FAILED_STARTS - 1)]
        assert restarts.delay_s(1.0) is not None
    assert None not in [restarts.delay_s(None) for _ in range(MAX_FAILED_STARTS - 1)]
    assert restarts.delay_s(None) is None


# ---- the life of small servers ----


def test_a_killed_server_starts_again_at_its_address(folder: Path, tmp_path: Path) -> None:
    with fleet(folder, tmp_path / "log", module=SMALL) as running, running.wait_until_it_serves() as http:
        before = pids_of(http)
        assert len(before) == 2
        for url in before:
            os.kill(before[url], signal.SIGKILL)
            wait_until(lambda: len(now := pids_of(http)) == 2 and not {*now.values()} & {before[url]})  # noqa: B023
        # The list of servers may be from before the loss, and the answer from the new process.
        wait_until(lambda: pids_of(http).keys() == before.keys())
        assert "server 0 has ended with code -9; it starts again in 0.05 s" in running.log()
        assert http.get("/health").json() == {"status": "ok", "num_replicas": 2, "num_available": 2}
        assert running.stop() == 0


@pytest.mark.slow
def test_a_server_that_cannot_start_is_given_up_and_the_others_go_on(folder: Path, tmp_path: Path) -> None:
    with fleet(folder, tmp_path / "log", module=SMALL) as running, running.wait_until_it_serves() as http:
        (url, pid), _ = pids_of(http).items()
        (folder / FAILING).write_text(json.dumps({"server 0": 7}))
        try:
            os.kill(pid, signal.SIGTERM)
            running.wait_for_log("server 0 has ended with code 7 before it took requests, again, and is given up")
            health = http.get("/health")
            assert health.status_code == 200
            assert health.json() == {"status": "ok", "num_replicas": 2, "num_available": 1, "given_up": [url]}
            assert running.log().count("it starts again in") == MAX_FAILED_STARTS
            assert http.get("/anything").status_code == 200
            (folder / FAILING).write_text(json.dumps({"server 1": 7}))
            (pid,) = pids_of(http).values()
            os.kill(pid, signal.SIGKILL)
            assert running.process.wait(PATIENCE_S) == 1
            assert "no server is left" in running.log()
        finally:
            (folder / FAILING).unlink()
        assert running.tree.wait_until_ended(5.0) == []


@pytest.mark.slow
def test_servers_that_refuse_their_options_end_the_command(folder: Path, tmp_path: Path) -> None:
    (folder / FAILING).write_text(json.dumps({"server 1": 2}))
    try:
        with fleet(folder, tmp_path / "log", module=SMALL) as running:
            assert running.process.wait(PATIENCE_S) == 2
            assert running.tree.wait_until_ended(5.0) == []
            assert "server 1 cannot start; its log says why" in running.log()
    finally:
        (folder / FAILING).unlink()


@pytest.mark.parametrize("way", ["toml", pytest.param("json", marks=pytest.mark.slow)])
def test_a_file_with_replicas_starts_so_many_servers(way: str, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / f"options.{way}"
    file.write_text('replicas = 3\napi-key = "k"\n' if way == "toml" else '{"replicas": 3, "api-key": "k"}')
    with fleet(folder, tmp_path / "log", "--config", str(file), module=SMALL) as running:
        running.wait_until_it_serves().close()
        assert len(running.tree.pids()) == 4
        for pid in running.tree.pids():
            assert b"api-key" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert running.stop() == 0


@pytest.mark.slow
def test_pages_of_allowed_origins_may_call_the_front(folder: Path, tmp_path: Path) -> None:
    origin = "https://example.org"
    with (
        fleet(folder, tmp_path / "log", "--allow-origin", origin, "--api-key", "k", module=SMALL) as running,
        running.wait_until_it_serves() as http,
    ):
        asking = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        answer = http.options("/v1/chat/completions", headers=asking)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
        refused = http.get("/v1/models", headers={"Origin": origin})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin)
        passed = http.get("/v1/models", headers={"Origin": origin, "Authorization": "Bearer k"})
        assert passed.status_code == 200
        assert passed.headers.get_list("access-control-allow-origin") == [origin]
        other = http.get("/health", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP])
def test_a_signal_while_servers_start_leaves_nothing(number: int, folder: Path, tmp_path: Path) -> None:
    with fleet(folder, tmp_path / "log") as running:
        wait_until(lambda: len(running.tree.pids()) == 3)
        code = running.stop(number)
        assert code == (-9 if number == signal.SIGKILL else 0)
        assert "Traceback" not in running.log()


# ---- servers of a model ----


@pytest.mark.slow
def test_several_servers_answer_at_one_address_and_end_with_it(folder: Path, tmp_path: Path) -> None:
    with fleet(folder, tmp_path / "log") as running, running.wait_until_it_serves() as http:
        body = {"model": "tiny", "temperature": 0, "max_tokens": 4, "ignore_eos": True}
        places = set()
        for number in range(4):
            answer = http.post("/v1/completions", json={**body, "prompt": f"{number} " * 40})
            assert answer.status_code == 200
            places.add(answer.headers["x-quire-replica"])
        assert len(places) == 2
        assert running.stop() == 0
        for place in places:
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{place}/health")


@pytest.mark.slow
def test_requests_go_on_while_a_killed_server_starts_again(folder: Path, tmp_path: Path) -> None:
    with fleet(folder, tmp_path / "log") as running, running.wait_until_it_serves() as http:
        is_over = threading.Event()
        statuses: list[int] = []

        def load() -> None:
            while not is_over.is_set():
                body = {"model": "tiny", "prompt": f"{len(statuses)} " * 9, "max_tokens": 4, "ignore_eos": True}
                statuses.append(http.post("/v1/completions", json=body).status_code)

        thread = threading.Thread(target=load)
        thread.start()
        try:
            parent, *servers = sorted(running.tree.pids())
            assert parent == running.process.pid
            os.kill(servers[0], signal.SIGKILL)
            running.wait_for_log("has ended with code -9; it starts again in 1 s")
            wait_until(lambda: http.get("/health").json()["num_available"] == 1)
            wait_until(lambda: http.get("/health").json()["num_available"] == 2)
        finally:
            is_over.set()
            thread.join(PATIENCE_S)
        assert {*statuses} == {200}
        assert running.stop() == 0


@pytest.mark.slow
def test_running_streams_end_before_the_servers_do(folder: Path, tmp_path: Path) -> None:
    with fleet(folder, tmp_path / "log", "--drain-timeout", "600") as running, running.wait_until_it_serves() as http:
        with http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 1000}) as response:
            parts = response.iter_text()
            raw = next(parts)
            running.process.send_signal(signal.SIGTERM)
            raw += "".join(parts)
        *_, last, done = events_of(raw)
        assert (json.loads(last)["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        assert running.process.wait(PATIENCE_S) == 0
        assert running.tree.wait_until_ended(5.0) == []


@pytest.mark.slow
def test_streams_that_do_not_end_in_time_get_an_error(folder: Path, tmp_path: Path) -> None:
    with (
        fleet(folder, tmp_path / "log", "--drain-timeout", "0.1") as running,
        running.wait_until_it_serves() as http,
        http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 4000}) as response,
    ):
        parts = response.iter_text()
        raw = next(parts)
        running.process.send_signal(signal.SIGTERM)
        *_, error, done = events_of(raw + "".join(parts))
        assert (json.loads(error)["error"]["code"], done) == ("stopping", "[DONE]")
        assert running.process.wait(PATIENCE_S) == 0
        assert running.tree.wait_until_ended(5.0) == []


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once(folder: Path, tmp_path: Path) -> None:
    with (
        fleet(folder, tmp_path / "log", "--drain-timeout", "600") as running,
        running.wait_until_it_serves() as http,
        http.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 4000}) as response,
    ):
        parts = response.iter_text()
        next(parts)
        running.process.send_signal(signal.SIGTERM)
        running.wait_for_log("stopping:")
        assert running.stop() in (-signal.SIGTERM, 128 + signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError):
            list(parts)
