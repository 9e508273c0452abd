"""Applications of Ray Serve for the tests: a cluster on loopback, with a driver in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

# Starting Ray takes seconds on an idle machine.
PATIENCE_S = 300


class RayApp:
    """A running application.

    Args:
        process: the driver.
        url: address of Serve's proxy.
        log: the file of the driver's standard error.
    """

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S)
        self._log = log

    def deploy(self, options: dict[str, Any]) -> None:
        """Deploy options, and wait until they are served."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(options) + "\n")
        self.process.stdin.flush()
        self.expect("served")

    def expect(self, word: str) -> None:
        """Wait for a line of the driver."""
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            if line.strip() == word:
                return
            lines.append(line)
        raise AssertionError(f"the driver said {lines} and logged:\n{self._log.read_text()[-4000:]}")

    def wait_until_up(self) -> None:
        """Wait until Serve's proxy passes requests on."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with suppress(httpx.ConnectError):
                if self.http.get("/health").status_code == 200:
                    return
            assert time.monotonic() < deadline, "the application never answered"
            time.sleep(0.2)

    def replicas(self) -> dict[str, dict[str, Any]]:
        """Return what the router knows of each replica, by its name."""
        answer = self.http.get("/router/replicas").json()
        return {each["replica"]: each for each in answer["replicas"]}

    def wait_until(self, is_so: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, dict[str, Any]]:
        """Wait until something holds of the replicas' states."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so(state := self.replicas()):
            assert time.monotonic() < deadline, f"it never came to pass: {state}"
            time.sleep(0.1)
        return state

    def wait_until_idle(self, count: int) -> dict[str, dict[str, Any]]:
        """Wait until there are as many replicas, and nothing runs."""
        return self.wait_until(
            lambda state: len(state) == count and not any(each["num_in_flight"] for each in state.values())
        )


@contextmanager
def ray_app(options: dict[str, Any], logs: Path) -> Iterator[RayApp]:
    """Start a cluster of one node with an application, and end it afterwards."""
    root = Path(__file__).parents[2]
    env = {
        **os.environ,
        "PYTHONPATH": f"{root / 'src'}:{root}",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": str(PATIENCE_S),
        "RAY_worker_niceness": "0",
        # A choice is given up where a replica does not tell its queue in this time.
        "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "30",
        "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "30",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.serving.ray_driver", str(port)]
    log = logs / "ray.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env, cwd=root, text=True
        )
    with process:
        try:
            app = RayApp(process, f"http://127.0.0.1:{port}", log)
            app.expect("started")
            app.deploy(options)
            with app.http:
                app.wait_until_up()
                yield app
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(PATIENCE_S)
            finally:
                process.kill()
