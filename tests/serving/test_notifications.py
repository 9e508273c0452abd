"""Servers and routers tell the service manager when they take requests, and when they stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from quire.platform.service_manager import VARIABLE
from tests.server.process import PATIENCE_S, ServerProcess

ROOT = Path(__file__).parents[2]


@contextmanager
def manager(path: Path) -> Iterator[socket.socket]:
    """Yield the socket of a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(path))
        listening.settimeout(PATIENCE_S)
        yield listening


def states(listening: socket.socket) -> dict[str, str]:
    return dict(line.split("=", 1) for line in listening.recv(4096).decode().split("\n"))


def check_life(module: str, arguments: list[str], tmp_path: Path) -> None:
    """Start a command; it serves when it says so, and says that it stops, once."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", VARIABLE: str(tmp_path / "notify")}
    with (
        manager(tmp_path / "notify") as listening,
        (tmp_path / "log").open("w") as log,
        subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=log, stderr=log, env=env) as process,
    ):
        try:
            ready = states(listening)
            assert ready["READY"] == "1"
            url = ready["STATUS"].rpartition(" at ")[2]
            assert httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert states(listening) == {"STOPPING": "1"}
            assert process.wait(PATIENCE_S) == 0
            listening.setblocking(False)
            while True:
                try:
                    assert states(listening) == {"STOPPING": "1"}
                except BlockingIOError:
                    break
        finally:
            process.kill()


def test_a_router_tells(alone: ServerProcess, tmp_path: Path) -> None:
    check_life("quire", ["route", "--to", alone.url, "--port", "0"], tmp_path)


@pytest.mark.slow
def test_replicas_tell_once_for_all_servers(folder: Path, tmp_path: Path) -> None:
    check_life("tests.serving.small_fleet", ["serve", str(folder), "--port", "0", "--replicas", "2"], tmp_path)


@pytest.mark.slow
def test_a_server_tells_when_its_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    check_life("quire", ["serve", str(folder), "--port", "0", "--num-kv-blocks", "300"], tmp_path)
