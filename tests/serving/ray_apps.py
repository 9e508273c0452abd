"""Applications of Ray Serve for the tests: a cluster on loopback, with a driver in a process of its own.

A cluster of several nodes has a raylet for each, at an address of its own of loopback (127.0.0.2, 127.0.0.3, ...).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

# Starting Ray takes seconds on an idle machine.
PATIENCE_S = 300
REPLICA = "x-quire-replica"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
# What differs between two answers to one request.
OWN = frozenset({"id", "created", "modified_at", "system_fingerprint"})


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
        self.log = log

    def deploy(self, options: dict[str, Any], deployments: list[dict[str, Any]] | None = None) -> None:
        """Deploy options, and wait until they are served.

        Args:
            options: options of the application.
            deployments: Serve's options of each deployment; None deploys without Serve's configuration.
        """
        self.tell({"deploy": options, **({} if deployments is None else {"deployments": deployments})})
        self.expect("served")

    def tell(self, command: dict[str, Any]) -> None:
        """Send the driver a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def expect(self, word: str) -> str:
        """Wait for a line of the driver that begins with a word, and return it."""
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            if line.startswith(word):
                return line.strip()
            lines.append(line)
            if line.startswith("{"):  # the status of an application that is not served
                break
        raise AssertionError(f"the driver said {lines} and logged:\n{self.log.read_text()[-4000:]}")

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
def in_threads(work: Callable[[int], None], count: int) -> Iterator[list[str]]:
    """Run a function in threads, and yield what went wrong."""
    wrong: list[str] = []

    def run(number: int) -> None:
        try:
            work(number)
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield wrong
    finally:
        for thread in threads:
            thread.join(PATIENCE_S)


def free_port() -> int:
    """Return a port of loopback that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def ray_app(
    options: dict[str, Any],
    logs: Path,
    *,
    nodes: Sequence[dict[str, Any]] = (),
    deployments: list[dict[str, Any]] | None = None,
    more_env: Mapping[str, str] | None = None,
) -> Iterator[RayApp]:
    """Start a cluster with an application, and end it afterwards.

    Args:
        options: options of the application.
        logs: folder of the driver's log.
        nodes: Ray's parameters of each node, `node_ip_address` among them, the head first; empty for one node.
        deployments: Serve's options of each deployment.
        more_env: variables of the environment of all processes of the cluster.
    """
    root = Path(__file__).parents[2]
    env = {
        # A node may claim GPUs that the tests may not see.
        **{name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"},
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
        **(more_env or {}),
    }
    port = free_port()
    command = [sys.executable, "-m", "tests.serving.ray_driver", str(port)]
    if nodes:
        command.append(json.dumps(nodes))
    log = logs / "ray.log"
    with ExitStack() as stack:
        # Ray keeps the address of its last cluster there, which others would connect to.
        env["RAY_TMPDIR"] = stack.enter_context(TemporaryDirectory(prefix="quire-", ignore_cleanup_errors=True))
        process = stack.enter_context(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(log.open("w")),
                env=env,
                cwd=root,
                text=True,
            )
        )
        try:
            app = RayApp(process, f"http://127.0.0.1:{port}", log)
            app.expect("started")
            app.deploy(options, deployments)
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


def complete(app: RayApp, prompt: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    response = app.http.post("/v1/completions", json={**GREEDY, "prompt": prompt, **fields}, headers=headers)
    assert response.status_code == 200, response.text
    return response


def content_of(answer: httpx.Response) -> Any:
    """Return what two answers to one request have in common."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        return texts_of([line[6:] for line in answer.text.splitlines() if line.startswith("data: ")])
    try:
        found = answer.json()
    except ValueError:
        return answer.text
    if isinstance(found, dict):
        for name in OWN & found.keys():
            del found[name]
        for each in found.get("data") or ():  # of embeddings
            each["embedding"] = [round(number, 4) for number in each["embedding"]]
        if isinstance(found.get("usage"), dict):
            found["usage"].pop("prompt_tokens_details", None)  # each cache has what it was asked for before
    return found


def texts_of(lines: list[str]) -> tuple[str, list[str], list[str]]:
    """Return the text of a stream, whose chunks depend on time, its finish reasons, and what is no chunk."""
    choices = [each for line in lines if line.startswith("{") for each in json.loads(line)["choices"]]
    text = "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices)
    reasons = [each["finish_reason"] for each in choices if each["finish_reason"]]
    return text, reasons, [line for line in lines if not line.startswith("{")]


def wait_until_settled(app: RayApp, count: int = 2) -> dict[str, dict[str, Any]]:
    """Wait until nothing runs, and the router knows of all events, for as long as one more might be on its way."""
    before: list[Any] = []
    while True:
        state = app.wait_until_idle(count)
        seen = [(each["replica"], each["next_seq"]) for each in state.values()]
        if seen == before:
            return state
        before = seen
        time.sleep(1.5)  # more than the silence after which the router asks for batches that it has not seen
