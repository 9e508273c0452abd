"""The servers of one machine: they start together, start again after they have ended, and stop with the proxy."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

from quire.config import EngineConfig
from quire.errors import EXIT_USER_ERROR, ConfigError, WorkerError
from quire.fleet.local.restarts import Restarts
from quire.fleet.local.server import LocalServer
from quire.fleet.local.settings import SharedMachine, settings_of_servers
from quire.fleet.proxy.fleet import Fleet
from quire.fleet.proxy.lifecycle import run_proxy
from quire.fleet.routing.failure_policy import FailurePolicy
from quire.platform.host_probe import num_cores
from quire.server.http.listener import read_max_connections
from quire.server.http.stop_signals import take_signals
from quire.server.log_setup import LogSettings
from quire.server.settings import ServerConfig

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S: Final = 0.5
POLL_S: Final = 0.05
# A server that takes no requests after this time is killed.
START_S: Final = 1800.0
# Time for a server to save its cache and end; its requests have ended before.
STOP_S: Final = 40.0


class LocalFleet(Fleet):
    """The servers of a proxy, which it starts and stops.

    Args:
        servers: the servers.
        key: key for the proxy's own requests; None without keys.
        policy: policies of the proxy where servers fail.
    """

    def __init__(self, servers: Sequence[LocalServer], key: str | None, policy: FailurePolicy) -> None:
        super().__init__([server.url for server in servers], key, PROBE_INTERVAL_S, policy=policy)
        self._servers = servers
        self._keeping: list[asyncio.Task[None]] = []
        self._given_up: list[str] = []
        self._was_up: set[str] = set()
        self._refusal: str | None = None

    @property
    def has_failed(self) -> bool:
        """True once no server is left."""
        return len(self._given_up) == len(self._servers)

    async def start(self) -> None:
        """Start all servers; return once each takes requests or was given up.

        Raises:
            WorkerError: a server refuses its options.
        """
        self._keeping = [asyncio.create_task(self._keep(server)) for server in self._servers]
        await super().start()
        while len(self._was_up.union(self._given_up)) < len(self._servers):
            if self._refusal is not None:
                raise WorkerError(self._refusal)
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Stop all servers, after a limited time for each to end by itself."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await super().stop()
        processes = [server.process for server in self._servers if server.process is not None]
        for process in processes:
            process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + STOP_S
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
        for process in processes:
            process.kill()
            process.wait()

    def health(self) -> dict[str, Any]:
        """Return further fields of `/health`: the addresses of servers that were given up."""
        return {"given_up": self._given_up} if self._given_up else {}

    async def _keep(self, server: LocalServer) -> None:
        """Start a server, and start it again whenever it has ended, until it is given up."""
        restarts = Restarts()
        while True:
            served_s = await self._run(server)
            code = None if server.process is None else server.process.returncode
            if code == EXIT_USER_ERROR and served_s is None and server.url not in self._was_up:
                self._refusal = f"{server.name} cannot start; its log says why"
                return
            delay_s = restarts.delay_s(served_s)
            if delay_s is None:
                break
            logger.error("%s has ended with code %s; it starts again in %g s", server.name, code, delay_s)
            await asyncio.sleep(delay_s)
        logger.error("%s has ended with code %s before it took requests, again, and is given up", server.name, code)
        self._given_up.append(server.url)
        if self.has_failed:
            logger.error("no server is left")
            signal.raise_signal(signal.SIGTERM)

    async def _run(self, server: LocalServer) -> float | None:
        """Run one process of a server to its end.

        Returns:
            The time for which it took requests; None if it took none.
        """
        try:
            server.start()
        except OSError as error:
            logger.error("%s does not start: %s", server.name, error.strerror or error)
            return None
        process, replica = server.process, self.replicas[server.url]
        assert process is not None
        started_s, up_s = time.monotonic(), None
        while process.poll() is None:
            if up_s is None and replica.is_up:
                up_s = time.monotonic()
                self._was_up.add(server.url)
            elif up_s is None and time.monotonic() - started_s > START_S:
                logger.error("%s takes no requests %g s after its start, and is killed", server.name, START_S)
                process.kill()
            await asyncio.sleep(POLL_S)
        ended_s = time.monotonic()
        while replica.is_up:  # until the next probe, which finds nobody listening
            await asyncio.sleep(POLL_S)
        return None if up_s is None else ended_s - up_s


def serve_replicas(
    count: int,
    engine: EngineConfig,
    config: ServerConfig,
    log: LogSettings,
    policy: FailurePolicy,
    listener: socket.socket,
) -> int:
    """Start servers on this machine, and forward requests to them until a stop signal arrives.

    Args:
        count: number of servers.
        engine: options of the engine.
        config: options of the address, and of each server.
        log: level and form of the logs.
        policy: policies of the proxy where servers fail.
        listener: bound socket.

    Returns:
        The exit code: 0, or 1 if all servers were given up.

    Raises:
        ConfigError: an option cannot hold for several servers.
        WorkerError: the servers refuse their options.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError("replicas needs sockets that share a port (SO_REUSEPORT), which this system lacks")
    settings = settings_of_servers(count, engine, config, log, SharedMachine(num_cores(), _has_events()))
    max_connections = read_max_connections(config.max_connections)
    with ExitStack() as stack:
        servers = [LocalServer(f"server {idx}", settings) for idx in range(count)]
        for server in servers:
            stack.callback(server.close)
        fleet = LocalFleet(servers, config.operator_key or config.api_key, policy)
        with asyncio.Runner() as runner:
            try:
                runner.run(_run(fleet, config, listener, max_connections))
            except asyncio.CancelledError:
                logger.info("stopped before all servers took requests")
        return 1 if fleet.has_failed else 0


async def _run(fleet: LocalFleet, config: ServerConfig, listener: socket.socket, max_connections: int) -> None:
    """Run the proxy; a signal before it takes requests stops the servers."""
    task = asyncio.current_task()
    assert task is not None

    def stop(_: int) -> None:
        task.cancel()

    take_signals(stop)
    try:
        await run_proxy(fleet, config, listener, max_connections)
    finally:
        await fleet.stop()


def _has_events() -> bool:
    """Return whether the extra of KV events is installed; without it, requests are routed by load and sessions."""
    try:
        import msgspec  # noqa: F401
        import zmq  # noqa: F401
    except ImportError:
        logger.warning("requests are routed without KV events: pip install 'quire[events]'")
        return False
    return True
