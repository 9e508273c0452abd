"""The listening socket of a server: its address, and the connections that it accepts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import ssl
import time
import uuid
from collections.abc import Callable

from quire.errors import ConfigError
from quire.server.http.connection import Connection, Connections
from quire.server.requests.errors import too_many_connections

logger = logging.getLogger(__name__)

BACKLOG = 2048
DEFAULT_MAX_CONNECTIONS = 8192
# Descriptors for later use other than connections: processes that compile grammars, the disk cache.
RESERVED_DESCRIPTORS = 64
# Connections that are accepted before other tasks have a turn.
ACCEPTS_AT_ONCE = 32
RETRY_AFTER_S = 1.0
ERROR_LOG_INTERVAL_S = 60.0


def read_max_connections(wanted: int | None) -> int:
    """Return the maximum number of connections.

    Args:
        wanted: configured number; None for as many as the limit of descriptors allows, at most
            `DEFAULT_MAX_CONNECTIONS`.

    Raises:
        ConfigError: the number is less than 1 or more than the limit leaves, or the limit leaves none.
    """
    limit = _max_open_files()
    room = DEFAULT_MAX_CONNECTIONS if limit is None else limit - len(os.listdir("/dev/fd")) - RESERVED_DESCRIPTORS
    if wanted is not None and wanted < 1:
        raise ConfigError(f"max_connections must be at least 1, got {wanted}", field="max_connections")
    if room < (wanted or 1):
        raise ConfigError(
            f"max_connections must be at most {max(room, 0)} under this process' limit of {limit} open files "
            f"(ulimit -n), got {'none' if wanted is None else wanted}",
            field="max_connections",
        )
    return min(room, DEFAULT_MAX_CONNECTIONS) if wanted is None else wanted


def _max_open_files() -> int | None:
    """Return this process' limit of open files; None for no limit."""
    try:
        import resource  # not on Windows, which has no such limit
    except ImportError:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


async def accept_connections(
    listener: socket.socket,
    connections: Connections,
    make_connection: Callable[[], Connection],
    tls: ssl.SSLContext | None,
) -> None:
    """Accept connections until cancelled, then close the listener; excess connections are answered with a 503.

    If the process has no descriptors left, it retries after `RETRY_AFTER_S`, and logs at most once per
    `ERROR_LOG_INTERVAL_S`.
    """
    with listener:
        await _accept(listener, connections, make_connection, tls)


async def _accept(
    listener: socket.socket,
    connections: Connections,
    make_connection: Callable[[], Connection],
    tls: ssl.SSLContext | None,
) -> None:
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    listener.listen(BACKLOG)
    opening: set[asyncio.Task[object]] = set()
    logged_s = -ERROR_LOG_INTERVAL_S
    num_taken = 0
    while True:
        try:
            client, _ = await loop.sock_accept(listener)
        except ConnectionAbortedError:
            continue
        except OSError as error:
            if time.monotonic() - logged_s > ERROR_LOG_INTERVAL_S:
                logged_s = time.monotonic()
                logger.error("no connection can be taken: %s", error.strerror)
            await asyncio.sleep(RETRY_AFTER_S)
            continue
        if connections.make_room():
            connection = make_connection()
            connections.begin_opening(connection)
            task = loop.create_task(_open(client, connection, connections, tls))
            opening.add(task)  # a task without a reference may be collected
            task.add_done_callback(opening.discard)
        else:
            _reject(client)
        num_taken += 1
        if num_taken % ACCEPTS_AT_ONCE == 0:
            await asyncio.sleep(0)


async def _open(
    client: socket.socket, connection: Connection, connections: Connections, tls: ssl.SSLContext | None
) -> None:
    timeout_s = None if tls is None else connections.receive_timeout_s
    try:
        # The client may have left already, or speak another protocol.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, client, ssl=tls, ssl_handshake_timeout=timeout_s
            )
    finally:
        connections.end_opening(connection)


def _reject(client: socket.socket) -> None:
    error = too_many_connections()
    body = json.dumps(error.body())
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nretry-after: {error.headers['Retry-After']}\r\n"
        f"x-request-id: {uuid.uuid4().hex}\r\nconnection: close\r\n\r\n"
    )
    with contextlib.suppress(OSError), client:
        client.setblocking(False)
        client.send((head + body).encode())
        client.shutdown(socket.SHUT_WR)
        # Unread data would turn the close into a reset, by which the client may lose the answer.
        client.recv(1 << 16)
