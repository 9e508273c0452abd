"""`quire serve --replicas N`: servers of one model on this machine, each in its own process, with one proxy."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Final

from quire.errors import ConfigError, WorkerError
from quire.fleet.proxy.fleet import Fleet
from quire.fleet.proxy.lifecycle import run_proxy
from quire.server.http.listener import read_max_connections
from quire.server.settings import ServerConfig

logger = logging.getLogger(__name__)

MAX_REPLICAS: Final = 64
ADDRESS: Final = re.compile(r"Quire serves .* at (http://\S+)")
EVENTS: Final = {
    "enable_kv_cache_events": True,
    "endpoint": "tcp://127.0.0.1:*",
    "replay_endpoint": "tcp://127.0.0.1:*",
}
# Options of the address, with one value each, which apply to the proxy instead of the servers.
FRONT: Final = frozenset(
    {
        *("--replicas", "--host", "--port", "--uds", "--ssl-certfile", "--ssl-keyfile"),
        *("--allow-origin", "--allowed-origins"),
    }
)
START_S: Final = 1800.0
STOP_S: Final = 40.0


class LocalServers:
    """The processes of the servers."""

    def __init__(self, arguments: Sequence[str], count: int, threads: int) -> None:
        has_events = any(argument.startswith("--kv-events-config") for argument in arguments)
        has_threads = any(argument.startswith("--num-threads") for argument in arguments)
        self._command = [sys.executable, "-m", "quire", "serve", *arguments, "--host", "127.0.0.1", "--port", "0"]
        if not has_threads:
            self._command += ["--num-threads", str(threads)]
        if not has_events and _has_events():
            self._command += ["--kv-events-config", json.dumps(EVENTS)]
        self.processes = [self._start() for _ in range(count)]

    def addresses(self) -> list[str]:
        """Wait until all servers take requests, and return their addresses."""
        deadline_s = time.monotonic() + START_S
        return [_address_of(process, idx, deadline_s) for idx, process in enumerate(self.processes)]

    def stop(self) -> None:
        """Stop all servers, after a limited time for their requests."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + STOP_S
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline_s - time.monotonic()))
            process.kill()
            process.wait()

    def _start(self) -> subprocess.Popen[str]:
        # Signals of the terminal reach only this process, which lets the servers finish first.
        return subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def serve_replicas(arguments: Sequence[str], count: int, config: ServerConfig, listener: socket.socket) -> int:
    """Start servers on this machine, and forward requests to them until a stop signal arrives.

    Args:
        arguments: arguments of `quire serve`.
        count: number of servers.
        config: options of the address, the keys and the limits.
        listener: bound socket.

    Returns:
        The exit code: 0, or 1 if all servers have ended.

    Raises:
        ConfigError: the number of servers is not allowed.
        WorkerError: a server did not start.
    """
    if not 1 <= count <= MAX_REPLICAS:
        raise ConfigError(f"replicas must be from 1 to {MAX_REPLICAS}, got {count}", field="replicas")
    max_connections = read_max_connections(config.max_connections)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    servers = LocalServers(without_address(arguments), count, max(1, num_cores // count))
    try:
        fleet = Fleet(servers.addresses(), config.operator_key or config.api_key, 0.5)
        with asyncio.Runner() as runner:
            runner.run(_run(servers, fleet, config, listener, max_connections))
        return 0 if any(process.poll() is None for process in servers.processes) else 1
    finally:
        servers.stop()


def without_address(arguments: Sequence[str]) -> list[str]:
    """Return arguments of `quire serve` without the arguments of the proxy."""
    kept: list[str] = []
    is_value = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if is_value:
            is_value = False
        elif name in FRONT:
            is_value = not equals
        elif name != "--watch":
            kept.append(argument)
    return kept


async def _run(
    servers: LocalServers, fleet: Fleet, config: ServerConfig, listener: socket.socket, max_connections: int
) -> None:
    """Forward requests until a signal arrives or all servers have ended."""
    watching = asyncio.create_task(_watch(servers))
    proxying = asyncio.create_task(run_proxy(fleet, config, listener, max_connections))
    try:
        await asyncio.wait({watching, proxying}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not proxying.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await proxying


async def _watch(servers: LocalServers) -> None:
    """Log servers that end; return when all have ended."""
    alive = dict(enumerate(servers.processes))
    while alive:
        for idx, process in tuple(alive.items()):
            if process.poll() is not None:
                logger.error("server %d has ended with code %s; the others go on", idx, process.returncode)
                del alive[idx]
        await asyncio.sleep(0.2)


def _address_of(process: subprocess.Popen[str], idx: int, deadline_s: float) -> str:
    """Return the address that a server prints."""
    assert process.stdout is not None
    timer = threading.Timer(max(0.0, deadline_s - time.monotonic()), process.kill)
    timer.daemon = True
    timer.start()
    try:
        for line in process.stdout:
            match = ADDRESS.match(line)
            if match is not None:
                threading.Thread(target=_discard, args=(process.stdout,), daemon=True).start()
                return match[1]
    finally:
        timer.cancel()
    raise WorkerError(f"server {idx} ended before it took requests, with code {process.wait()}; its log says why")


def _discard(lines: IO[str]) -> None:
    for _ in lines:
        pass


def _has_events() -> bool:
    """Return whether the extra of KV events is installed; without it, requests are routed by load and sessions."""
    try:
        import msgspec  # noqa: F401
        import zmq  # noqa: F401
    except ImportError:
        logger.warning("requests are routed without KV events: pip install 'quire[events]'")
        return False
    return True
