"""Requests to a server over HTTP/1.1, on persistent connections."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import h11

from quire.errors import ConfigError

CONNECT_S = 5.0
SEND_S = 60.0
MAX_HEAD = 64 << 10
READ_BYTES = 1 << 16
MAX_IDLE = 64
Headers = Sequence[tuple[bytes, bytes]]
Event = h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]


class UpstreamLost(Exception):
    """A connection to a server failed, or ended before the answer was complete."""


class Upstream:
    """The connections to one server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.path not in ("", "/"):
            raise ConfigError(f"a server must be an address like http://127.0.0.1:8000, got {url!r}", field="to")
        self.host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.authority = parts.netloc.rpartition("@")[2].encode()
        self._idle: list[UpstreamConnection] = []
        self._open: set[UpstreamConnection] = set()

    async def request(self, method: str, target: bytes, headers: Headers, body: bytes = b"") -> UpstreamResponse:
        """Send a request and return its answer once the head has arrived.

        An idle connection that the server has closed is replaced by a new one.
        """
        while self._idle:
            connection = self._idle.pop()
            with suppress(UpstreamLost):
                return await connection.exchange(method, target, headers, body)
        return await (await self._connect()).exchange(method, target, headers, body)

    async def fetch(
        self, method: str, path: str, headers: Headers = (), body: bytes = b"", *, timeout_s: float
    ) -> tuple[int, bytes]:
        """Return status and body of a short answer."""
        try:
            async with asyncio.timeout(timeout_s):
                response = await self.request(method, path.encode(), headers, body)
                try:
                    return response.status, b"".join([part async for part in response.parts()])
                finally:
                    response.close()
        except TimeoutError as error:
            raise UpstreamLost(f"no answer in {timeout_s:g} s") from error

    def abort(self) -> None:
        """Close all connections; the requests on them are lost."""
        for connection in tuple(self._open):
            connection.close()

    # ---- called by connections ----

    def keep(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next request."""
        if len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    def forget(self, connection: UpstreamConnection) -> None:
        """Forget a closed connection."""
        self._open.discard(connection)
        with suppress(ValueError):
            self._idle.remove(connection)

    async def _connect(self) -> UpstreamConnection:
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(self.host, self._port, ssl=self._tls)
        except (OSError, TimeoutError) as error:
            raise UpstreamLost(f"cannot connect: {str(error) or 'no answer'}") from error
        connection = UpstreamConnection(self, reader, writer)
        self._open.add(connection)
        return connection


class UpstreamConnection:
    """One connection."""

    def __init__(self, upstream: Upstream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._upstream = upstream
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT, MAX_HEAD)

    async def exchange(self, method: str, target: bytes, headers: Headers, body: bytes) -> UpstreamResponse:
        """Send a request and return its answer once the head has arrived."""
        try:
            fields = [(b"host", self._upstream.authority), *headers]
            if body or method in ("POST", "PUT", "PATCH"):
                fields.append((b"content-length", str(len(body)).encode()))
            head = self._http.send(h11.Request(method=method, target=target, headers=fields)) or b""
            data = (self._http.send(h11.Data(data=body)) or b"") if body else b""
            self._writer.write(head + data + (self._http.send(h11.EndOfMessage()) or b""))
            async with asyncio.timeout(SEND_S):
                await self._writer.drain()
            while True:
                event = await self.next_event()
                if isinstance(event, h11.Response):
                    return UpstreamResponse(self, event)
        except (OSError, TimeoutError, h11.ProtocolError) as error:
            self.close()
            raise UpstreamLost(str(error) or type(error).__name__) from error
        except BaseException:
            self.close()
            raise

    async def next_event(self) -> Event:
        """Return the next event from the server."""
        while (event := self.arrived_event()) is h11.NEED_DATA:
            try:
                self._http.receive_data(await self._reader.read(READ_BYTES))
            except (OSError, h11.RemoteProtocolError) as error:
                self.close()
                raise UpstreamLost(str(error) or type(error).__name__) from error
        return event

    def arrived_event(self) -> Event:
        """Return the next event that has arrived; `NEED_DATA` after the last one."""
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self.close()
            raise UpstreamLost(str(error)) from error
        if isinstance(event, h11.ConnectionClosed):
            self.close()
            raise UpstreamLost("the server closed the connection")
        return event

    def finish(self) -> None:
        """Keep the connection for the next request if the answer was complete and both sides allow it."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            self._upstream.keep(self)
        else:
            self.close()

    def close(self) -> None:
        """Close the connection at once."""
        self._upstream.forget(self)
        self._writer.transport.abort()


class UpstreamResponse:
    """The answer to a request."""

    def __init__(self, connection: UpstreamConnection, head: h11.Response) -> None:
        self.status = head.status_code
        self.headers: list[tuple[bytes, bytes]] = [(bytes(name), bytes(value)) for name, value in head.headers]
        self._connection: UpstreamConnection | None = connection

    def header(self, name: bytes) -> bytes:
        """Return the value of a header; empty if it is missing."""
        return next((value for key, value in self.headers if key == name), b"")

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body as they arrive; parts that arrive together are joined, to be sent together."""
        while self._connection is not None:
            event, data = await self._connection.next_event(), bytearray()
            while isinstance(event, h11.Data):
                data += event.data
                event = self._connection.arrived_event()
            if isinstance(event, h11.EndOfMessage):
                connection, self._connection = self._connection, None
                connection.finish()
            if data:
                yield bytes(data)

    def close(self) -> None:
        """Abandon the answer, unless it was read to its end; the server then ends the request."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
