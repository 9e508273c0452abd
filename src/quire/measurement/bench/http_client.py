"""One HTTP exchange on a new connection; the answer is read piece by piece while it arrives."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import h11

from quire.errors import ConfigError

READ_BYTES = 1 << 16
# Errors of an exchange, except cancellation.
FAILURES = (OSError, EOFError, h11.ProtocolError)


class Endpoint(NamedTuple):
    """The address of a server.

    Args:
        url: address for messages, without user and route.
        path: prefix of all routes.
        is_encrypted: True for TLS.
    """

    url: str
    host: str
    port: int
    path: str
    is_encrypted: bool

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Parse an address; a trailing `/v1` is removed, since routes contain it.

        Raises:
            ConfigError: `url` is not an HTTP address.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise _no_address(url) from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise _no_address(url)
        is_encrypted = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(
            f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}",
            parts.hostname,
            port or (443 if is_encrypted else 80),
            path,
            is_encrypted,
        )


class Response(NamedTuple):
    """An answer whose head has arrived.

    Args:
        status: HTTP status code.
        pieces: pieces of the body, as they arrive.
    """

    status: int
    pieces: AsyncIterator[bytes]

    async def read(self) -> bytes:
        """Return the rest of the body."""
        return b"".join([piece async for piece in self.pieces])


@asynccontextmanager
async def exchange(
    endpoint: Endpoint, method: str, route: str, headers: Mapping[str, str], body: bytes = b""
) -> AsyncIterator[Response]:
    """Send a request and yield its answer; close the connection at exit."""
    context = ssl.create_default_context() if endpoint.is_encrypted else None
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context)
    try:
        connection = h11.Connection(h11.CLIENT)
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        defaults = {"host": f"{host}:{endpoint.port}", "connection": "close", "content-length": str(len(body))}
        request = h11.Request(method=method, target=endpoint.path + route, headers=[*{**defaults, **headers}.items()])
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            writer.write(connection.send(event) or b"")
        await writer.drain()
        head = await _next_event(connection, reader)
        while isinstance(head, h11.InformationalResponse):
            head = await _next_event(connection, reader)
        if not isinstance(head, h11.Response):
            raise EOFError("the connection was closed before an answer came")
        yield Response(head.status_code, _pieces(connection, reader))
    finally:
        writer.transport.abort()  # the answer was read, or its rest is not needed


async def _pieces(connection: h11.Connection, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while isinstance(event := await _next_event(connection, reader), h11.Data):
        yield bytes(event.data)


async def _next_event(connection: h11.Connection, reader: asyncio.StreamReader) -> Any:
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(READ_BYTES))
    return event


def reason(error: Exception) -> str:
    """Return the text of an error of `FAILURES`."""
    if isinstance(error, OSError) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0)
    return str(error) or type(error).__name__


def _no_address(url: str) -> ConfigError:
    return ConfigError(f"url must be an address like http://127.0.0.1:8000, got {url!r}", field="url")
