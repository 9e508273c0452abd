"""HTTP on a bound socket: uvicorn over connections with limits, for servers and the proxy."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import NamedTuple

import uvicorn
from starlette.types import ASGIApp

from quire.server.http.address import tls_context
from quire.server.http.connection import Connection, Connections
from quire.server.http.listener import accept_connections
from quire.server.settings import ServerConfig

# Time limit for sending the last chunks after the work has finished.
FLUSH_TIMEOUT_S = 5


class HttpServer(NamedTuple):
    """A server that accepts connections.

    Args:
        server: uvicorn's server; its `should_exit` ends `serving`.
        connections: open connections.
        serving: task that answers requests.
        accepting: task that accepts connections; when it is cancelled, the socket is closed.
        watching: task that closes connections at their time limits.
    """

    server: uvicorn.Server
    connections: Connections
    serving: asyncio.Task[None]
    accepting: asyncio.Task[None]
    watching: asyncio.Task[None]


async def start_http(app: ASGIApp, config: ServerConfig, listener: socket.socket, max_connections: int) -> HttpServer:
    """Serve an application on the running event loop; return when clients can connect.

    Args:
        app: ASGI application.
        config: options of connections.
        listener: bound socket; closed with `accepting`.
        max_connections: maximum number of connections.

    Raises:
        ConfigError: the certificate or its key cannot be used.
    """
    tls = tls_context(config.ssl_certfile, config.ssl_keyfile)
    connections = Connections(
        max_connections, config.receive_timeout_s, config.send_timeout_s, config.keep_alive_timeout_s
    )
    settings = uvicorn.Config(
        app,
        http=Connection,
        loop="asyncio",
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
    )
    server = uvicorn.Server(settings)
    serving = asyncio.create_task(server.serve(sockets=[]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    make_connection = partial(Connection, connections, config=settings, server_state=server.server_state, app_state={})
    accepting = asyncio.create_task(accept_connections(listener, connections, make_connection, tls))
    watching = asyncio.create_task(connections.watch())
    # The socket listens from the first turn of `accepting` on.
    await asyncio.sleep(0)
    return HttpServer(server, connections, serving, accepting, watching)
