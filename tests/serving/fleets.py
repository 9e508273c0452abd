"""Several servers and a proxy before them, in processes of their own, as a user starts them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.server.process import PATIENCE_S, ServerProcess, running

EVENTS = json.dumps(
    {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
)
FLAGS = ("--kv-events-config", EVENTS, "--num-kv-blocks", "300", "--max-num-seqs", "16", "--log-interval", "0")


class FleetProcesses:
    """Running servers and their proxy.

    Args:
        servers: the servers.
        process: the proxy.
        url: address of the proxy.
    """

    def __init__(self, servers: list[ServerProcess], process: subprocess.Popen[str], url: str) -> None:
        self.servers = servers
        self.process = process
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S)

    def replicas(self) -> dict[str, dict[str, Any]]:
        """Return what the proxy knows of each server, by its address."""
        answer = self.http.get("/router/replicas").json()
        return {replica["url"]: replica for replica in answer["replicas"]}

    def wait_until(self, is_so: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, dict[str, Any]]:
        """Wait until something holds of the servers' states."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so(state := self.replicas()):
            assert time.monotonic() < deadline, f"it never came to pass: {state}"
            time.sleep(0.02)
        return state

    def wait_until_settled(self) -> dict[str, dict[str, Any]]:
        """Wait until all servers are up, their events are known, and nothing runs."""
        for server in self.servers:
            server.wait_until_idle()
        counts = {server.url: _num_published(server) for server in self.servers}
        return self.wait_until(
            lambda state: all(
                state[url]["is_available"]
                and state[url]["events"] == "synced" * bool(count) + "unknown" * (not count)
                and not state[url]["num_in_flight"]
                for url, count in counts.items()
            )
        )


def _num_published(server: ServerProcess) -> int:
    return int(server.http.get("/kv_event_sources").json()["0"]["next_seq"])


@contextmanager
def fleet_of(folder: Path, logs: Path, count: int, *flags: str) -> Iterator[FleetProcesses]:
    """Start servers of a model and a proxy before them, and end them afterwards.

    Args:
        folder: of the model.
        logs: folder for the logs.
        count: number of servers.
        flags: of each server.
    """
    with ExitStack() as stack:
        servers = [
            stack.enter_context(running(folder, logs / f"server-{idx}.log", *FLAGS, *flags)) for idx in range(count)
        ]
        urls = ",".join(server.url for server in servers)
        yield stack.enter_context(proxy_before(servers, urls, logs / "proxy.log"))


@contextmanager
def proxy_before(servers: list[ServerProcess], urls: str, log: Path, *flags: str) -> Iterator[FleetProcesses]:
    """Start a proxy before running servers, with further flags of `quire route`."""
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "quire", "route", "--to", urls, "--port", "0", "--probe-interval", "0.1"]
    command += flags
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=env, text=True)
    with process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            match = re.search(r"Quire routes to \d+ servers at (http://\S+)", said)
            assert match, f"the proxy said {said!r} and logged:\n{log.read_text()}"
            fleet = FleetProcesses(servers, process, match[1])
            with fleet.http:
                yield fleet
        finally:
            process.kill()


@contextmanager
def router_before(server: ServerProcess, log: Path, *flags: str) -> Iterator[ServerProcess]:
    """Start a router before a running server, with flags of `quire route`, and return it as a server is seen."""
    with proxy_before([server], server.url, log, *flags) as fleet:
        router = ServerProcess(fleet.process, fleet.url, log, {})
        with router.http:
            yield router
