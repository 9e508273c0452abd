"""A server in a process of its own: forked from one that has imported Quire, or as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.server.forked import ForkedProcess

PATIENCE_S = 60


class ServerProcess:
    """A running `quire serve`.

    Args:
        process: the process; it has printed its address.
        url: the address.
        log: the file of its standard error.
        headers: what every request of `http` sends.
        verify: certificates that `http` trusts.
    """

    def __init__(
        self,
        process: subprocess.Popen[str] | ForkedProcess,
        url: str,
        log: Path,
        headers: dict[str, str],
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        self.process = process
        self.url = url
        self.log = log
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S, headers=headers, verify=verify)

    def post(self, path: str, body: Any) -> httpx.Response:
        """Send JSON."""
        return self.http.post(path, json=body)

    def status(self) -> dict[str, Any]:
        """Return `GET /status`."""
        return dict(self.http.get("/status").json())

    def wait_until(self, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first status for which something holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so(status := self.status()):
            assert status["engine"]["is_alive"], f"the engine has died:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"it never came to pass: {status}"
            time.sleep(0.01)
        return status

    def wait_until_idle(self) -> dict[str, Any]:
        """Wait until no request is left and no block is held."""
        return self.wait_until(lambda status: not status["requests"] and status["memory"]["used"] == 0)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


@contextmanager
def running(
    folder: Path,
    log: Path,
    *flags: str,
    key: str | None = None,
    module: str | None = None,
    verify: ssl.SSLContext | bool = True,
) -> Iterator[ServerProcess]:
    """Start a server on a free port and end it afterwards, whatever happened.

    Args:
        folder: of the model.
        log: a file for standard error.
        flags: of `quire serve`.
        key: the API key, given through the environment.
        module: what a new interpreter runs, "quire" or something in its place; None forks the server, which is ready
            in less than half of the time.
        verify: certificates that clients trust.
    """
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    for name in ("QUIRE_API_KEY", "QUIRE_OPERATOR_KEY"):
        env.pop(name, None)
    if key is not None:
        env["QUIRE_API_KEY"] = key
    command = ["serve", str(folder), "--port", "0", "--num-threads", "1", "--served-model-name", "tiny", *flags]
    process: subprocess.Popen[str] | ForkedProcess
    if module is None:
        process = ForkedProcess(command, log, env)
    else:
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *command], stdout=subprocess.PIPE, stderr=errors, env=env, text=True
            )
    with process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            match = re.search(r"Quire serves tiny at (https?://\S+)", said)
            assert match, f"the server said {said!r} and logged:\n{log.read_text()}"
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            server = ServerProcess(process, match[1], log, headers, verify)
            with server.http:
                yield server
        finally:
            process.kill()
