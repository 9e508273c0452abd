"""Stores for tests of the remote prefix cache: a real server, and a fake one that misbehaves on demand."""

from __future__ import annotations

import shutil
import socket
import socketserver
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

BINARIES = ("valkey-server", "redis-server")
START_S = 60.0


def binary() -> str:
    """Return the path of a server's binary; skip the test where there is none."""
    found = next(filter(None, map(shutil.which, BINARIES)), None)
    if found is None:
        pytest.skip(f"neither {' nor '.join(BINARIES)} is installed here (Debian has packages of these names)")
    return found


def free_port() -> int:
    """Return a port of loopback that nobody listens to now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A real server on loopback, without persistence.

    Args:
        folder: its working directory.
        options: further options of its command line.
        port: port; None takes a free one.
    """

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self.url = f"redis://127.0.0.1:{self.port}/0"
        command = [binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command += ["--dir", str(folder), "--logfile", "", "--daemonize", "no", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = monotonic() + START_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1.0) as probe:
                    probe.settimeout(5.0)
                    probe.sendall(b"PING\r\n")
                    if probe.recv(64):
                        return
            except OSError:
                if self.process.poll() is not None or monotonic() > deadline:
                    raise

    def client(self, **options: Any) -> Any:
        """Return a client of the server."""
        import redis

        return redis.Redis(port=self.port, **options)

    def stop(self) -> None:
        """Kill the server."""
        self.process.kill()
        self.process.wait(60)


@contextmanager
def server(folder: Path, *options: str, port: int | None = None) -> Iterator[Server]:
    """Run a real server."""
    running = Server(folder, *options, port=port)
    try:
        yield running
    finally:
        running.stop()


Answer = Callable[[bytes], bytes | None]


@contextmanager
def relay(port: int, change: Callable[[int], Answer]) -> Iterator[int]:
    """Listen between clients and a server, and change what the server answers.

    Args:
        port: port of the server; 0 for none: clients' bytes are read, and answered by `change` alone.
        change: function that returns, for the number of a connection, a function of each piece of an answer; that
            returns the bytes to pass on; the connection is cut off behind a shortened piece, and for None.

    Yields:
        The port to connect to.
    """
    numbers = iter(range(1 << 30))

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            answer = change(next(numbers))
            upstream = socket.create_connection(("127.0.0.1", port), 30.0) if port else None
            try:
                if upstream is not None:
                    threading.Thread(target=self.forward, args=(upstream,), daemon=True).start()
                while True:
                    data = (upstream or self.request).recv(1 << 16)
                    if not data:
                        return
                    passed = answer(data)
                    if passed is None:
                        return
                    self.request.sendall(passed)
                    if upstream is not None and len(passed) < len(data):
                        return
            except OSError:
                return
            finally:
                if upstream is not None:
                    upstream.close()

        def forward(self, upstream: socket.socket) -> None:
            try:
                while data := self.request.recv(1 << 16):
                    upstream.sendall(data)
            except OSError:
                pass

    class Listener(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True
        request_queue_size = 64

    with Listener(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield listener.server_address[1]
        listener.shutdown()
        thread.join(30)
