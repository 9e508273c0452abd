"""The life of a proxy: socket, servers, signals, and a shutdown after running requests."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import closing

from quire.fleet.proxy.app import Proxy
from quire.fleet.proxy.exchange import MAX_INTEGERS
from quire.fleet.proxy.fleet import Fleet
from quire.platform.bounded.json_text import limit_digits
from quire.platform.service_manager import notify
from quire.server.http.address import url_of
from quire.server.http.http_server import FLUSH_TIMEOUT_S, HttpServer, start_http
from quire.server.http.listener import read_max_connections
from quire.server.http.stop_signals import end_at_once, take_signals
from quire.server.requests.body import BodyReader
from quire.server.requests.errors import stopping
from quire.server.settings import ServerConfig
from quire.server.state.auth import guarded
from quire.server.state.intake import Intake

logger = logging.getLogger(__name__)


def serve_proxy(
    fleet: Fleet, config: ServerConfig, listener: socket.socket, on_start: Callable[[], None] | None = None
) -> int:
    """Forward requests until a stop signal arrives.

    Args:
        fleet: the servers.
        config: options of the address, the keys and the limits.
        listener: bound socket.
        on_start: function that is called once the proxy takes requests.

    Returns:
        The exit code, 0.
    """
    max_connections = read_max_connections(config.max_connections)
    with asyncio.Runner() as runner:
        runner.run(run_proxy(fleet, config, listener, max_connections, on_start))
    return 0


async def run_proxy(
    fleet: Fleet,
    config: ServerConfig,
    listener: socket.socket,
    max_connections: int,
    on_start: Callable[[], None] | None = None,
) -> None:
    """Forward requests on the running event loop; see `serve_proxy`."""
    limit_digits()
    with closing(BodyReader(config.body_limit(reads_images=True), MAX_INTEGERS)) as bodies:
        proxy = Proxy(fleet, bodies, config.tenant_header, has_operators=config.operator_key is not None)
        app = guarded(Intake(proxy, bodies=bodies, admit=proxy.admit), config)
        await fleet.start()
        http = await start_http(app, config, listener, max_connections)
        stopped = asyncio.Event()

        def on_signal(number: int) -> None:
            if stopped.is_set():
                end_at_once(number)
            stopped.set()

        take_signals(on_signal)
        print(said := f"Quire routes to {len(fleet.replicas)} servers at {url_of(listener, config.scheme)}", flush=True)
        notify("READY=1", f"STATUS={said}")
        if on_start is not None:
            on_start()
        waiting = asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait({waiting, http.serving, http.accepting}, return_when=asyncio.FIRST_COMPLETED)
            stopped.set()
            await _drain(proxy, http, config.drain_timeout_s)
        finally:
            waiting.cancel()
            http.server.should_exit = True
            http.watching.cancel()
            http.accepting.cancel()
            await fleet.stop()
            await asyncio.gather(http.serving, http.accepting, http.watching, return_exceptions=True)


async def _drain(proxy: Proxy, http: HttpServer, timeout_s: float) -> None:
    """Refuse new requests, let those in flight finish within the time limit, and end the others with an error."""
    notify("STOPPING=1")
    logger.info("stopping: %d requests may run for %g s more", len(proxy.exchanges), timeout_s)
    proxy.is_draining = True
    http.connections.drain()
    try:
        async with asyncio.timeout(timeout_s):
            while len(proxy.exchanges) and not http.serving.done():
                await asyncio.sleep(0.02)
            # Clients may still be reading long answers.
            if answering := set(http.server.server_state.tasks):
                await asyncio.wait(answering)
    except TimeoutError:
        proxy.exchanges.end(stopping())
        if ending := set(http.server.server_state.tasks):
            await asyncio.wait(ending, timeout=FLUSH_TIMEOUT_S)
