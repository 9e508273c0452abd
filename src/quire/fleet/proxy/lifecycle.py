"""The life of a proxy: socket, servers, signals, and a shutdown after running requests."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

from quire.fleet.proxy.app import Proxy
from quire.fleet.proxy.fleet import Fleet
from quire.server.http.address import url_of
from quire.server.http.http_server import start_http
from quire.server.http.listener import read_max_connections
from quire.server.settings import ServerConfig
from quire.server.state.auth import guarded

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
    proxy = Proxy(fleet, config.max_body_bytes, config.tenant_header, has_operators=config.operator_key is not None)
    await fleet.start()
    http = await start_http(guarded(proxy, config), config, listener, max_connections)
    stopped = _stop_signal()
    print(f"Quire routes to {len(fleet.replicas)} servers at {url_of(listener, config.scheme)}", flush=True)
    if on_start is not None:
        on_start()
    try:
        await asyncio.wait({stopped, http.serving, http.accepting}, return_when=asyncio.FIRST_COMPLETED)
        logger.info("stopping: %d requests may run for %g s more", proxy.num_requests, config.drain_timeout_s)
        http.connections.drain()
        http.accepting.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(config.drain_timeout_s):
                while proxy.num_requests and not http.serving.done():
                    await asyncio.sleep(0.02)
    finally:
        http.server.should_exit = True
        http.watching.cancel()
        await fleet.stop()
        await asyncio.gather(http.serving, http.accepting, http.watching, return_exceptions=True)


def _stop_signal() -> asyncio.Future[None]:
    """Return a future that ends with the first stop signal; the second signal ends the process."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[None] = loop.create_future()

    def on_signal(number: int) -> None:
        if not stopped.done():
            stopped.set_result(None)
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(ValueError):  # not in the main thread
            loop.add_signal_handler(number, on_signal, number)
    return stopped
