"""Requests to a server over HTTP/1.1, on persistent connections."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, cast
from urllib.parse import urlsplit

import h11

from quire.errors import ConfigError
from quire.fleet.proxy.answers import AnswerParser

CONNECT_S: Final = 5.0
# Time limits for a server to take a part of a request, and to send the rest of a head.
SEND_S: Final = 60.0
HEAD_S: Final = 30.0
# Bytes of a request that are handed to the system at once.
PIECE_BYTES: Final = 256 << 10
# Bytes of an answer that may wait to be parsed before no more are read, and events that are joined to one part.
MAX_UNPARSED: Final = 256 << 10
MAX_JOINED: Final = 512
# Idle connections, and the time after which one is not used again: most servers close them after 5 s.
MAX_IDLE: Final = 64
MAX_IDLE_S: Final = 4.0
# Bytes of an answer to a request of the proxy itself.
MAX_FETCHED: Final = 64 << 10
Headers = Sequence[tuple[bytes, bytes]]


class UpstreamLost(Exception):
    """A connection to a server failed, or ended before the answer was complete.

    Args:
        message: description of the failure.
        was_sent: False if the server has got no part of the request, so that it cannot be its cause.
        is_refused: True if nothing listens at the server's address.
    """

    def __init__(self, message: str, *, was_sent: bool = True, is_refused: bool = False) -> None:
        super().__init__(message)
        self.was_sent = was_sent
        self.is_refused = is_refused


class UpstreamLate(UpstreamLost):
    """A server has sent nothing for too long."""


class UpstreamDamaged(UpstreamLost):
    """A server has sent an answer that is not valid HTTP, or whose end is ambiguous."""


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

        If an idle connection is lost before a byte of an answer, a new one is tried: the server may have closed it.

        Raises:
            UpstreamLost: there is no answer.
        """
        lost: UpstreamLost | None = None
        if (connection := self._idle_connection()) is not None:
            try:
                return await connection.exchange(method, target, headers, body)
            except UpstreamLost as error:
                if connection.has_arrived:
                    raise
                lost = error
        try:
            connection = await self._connect()
        except UpstreamLost as error:
            if lost is None:
                raise
            # The request may be what ended the server.
            lost.is_refused = error.is_refused
            raise lost from error
        return await connection.exchange(method, target, headers, body)

    async def fetch(
        self,
        method: str,
        path: str,
        headers: Headers = (),
        body: bytes = b"",
        *,
        timeout_s: float,
        max_bytes: int = MAX_FETCHED,
    ) -> tuple[int, bytes]:
        """Return status and body of a short answer.

        Raises:
            UpstreamLost: there is no answer in time, or it is too long.
        """
        try:
            async with asyncio.timeout(timeout_s):
                response = await self.request(method, path.encode(), headers, body)
                try:
                    return response.status, await read_whole(response.parts(), max_bytes, f"the answer to {path}")
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
        if connection in self._idle:
            self._idle.remove(connection)

    def _idle_connection(self) -> UpstreamConnection | None:
        """Return the connection that was used last, unless it has been idle for long."""
        if not self._idle:
            return None
        connection = self._idle.pop()
        if connection.idle_s <= MAX_IDLE_S:
            return connection
        # The others have been idle for longer.
        for old in (connection, *self._idle):
            old.close()
        return None

    async def _connect(self) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self), self.host, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            raise UpstreamLost(
                f"cannot connect: {str(error) or 'no answer'}",
                was_sent=False,
                is_refused=isinstance(error, ConnectionRefusedError),
            ) from error
        self._open.add(connection)
        return connection


class UpstreamConnection(asyncio.Protocol):
    """One connection.

    Attributes:
        has_arrived: True once a byte of the answer to the last request has arrived.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._loop = asyncio.get_running_loop()
        self._http = AnswerParser()
        self._transport: asyncio.Transport
        # Set when bytes have arrived, more can be written, or the connection was lost.
        self._changed = asyncio.Event()
        self._lost: UpstreamLost | None = None
        self._can_write = True
        self._num_unparsed = 0
        self._is_idle = True
        self._idle_since_s = self._loop.time()
        # False once an answer has begun before the whole request was sent.
        self._is_sent = True
        self.has_arrived = False

    @property
    def idle_s(self) -> float:
        """Time since the last answer."""
        return self._loop.time() - self._idle_since_s

    # ---- callbacks of asyncio ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take bytes of an answer; bytes that no request asked for close the connection."""
        if self._is_idle:
            self._lost = UpstreamDamaged("it has sent what no request asked for")
            self.close()
            return
        self.has_arrived = True
        self._http.receive_data(data)
        self._num_unparsed += len(data)
        if self._num_unparsed > MAX_UNPARSED:
            self._transport.pause_reading()
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Record the end of the connection."""
        if self._lost is None:
            self._lost = UpstreamLost(f"the server closed the connection{f': {exc}' if exc else ''}")
        self._upstream.forget(self)
        self._changed.set()

    def pause_writing(self) -> None:
        """Stop sending until the server has read more."""
        self._can_write = False

    def resume_writing(self) -> None:
        """Go on with sending."""
        self._can_write = True
        self._changed.set()

    # ---- one request and its answer ----

    async def exchange(self, method: str, target: bytes, headers: Headers, body: bytes) -> UpstreamResponse:
        """Send a request and return its answer once the head has arrived.

        Raises:
            UpstreamLost: there is no answer.
        """
        self._is_idle = self.has_arrived = False
        try:
            if self._lost is not None:
                raise self._lost
            self._write_head(method, target, headers, body)
            return UpstreamResponse(self, await self._send_body(body) or await self._head())
        except BaseException:
            self.close()
            raise

    async def next_event(self) -> Any:
        """Return the next event of the answer."""
        while (event := self.arrived_event()) is h11.NEED_DATA:
            await self._wait(None, "more of the answer has arrived")
        return event

    def arrived_event(self) -> Any:
        """Return the next event that has arrived; `NEED_DATA` after the last one."""
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self.close()
            raise UpstreamDamaged(f"its answer is damaged: {error}") from error
        if event is h11.NEED_DATA:
            if self._lost is not None:
                self.close()
                raise self._lost
            if self._num_unparsed > MAX_UNPARSED:
                self._transport.resume_reading()
            self._num_unparsed = 0
        return event

    def finish(self) -> None:
        """Keep the connection for the next request if both sides allow it.

        Raises:
            UpstreamDamaged: bytes have arrived beyond the end of the answer.
        """
        if self._http.trailing_data[0]:
            self.close()
            raise UpstreamDamaged("its answer goes on beyond its end")
        is_done = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        if is_done and self._is_sent and self._lost is None:
            self._http.start_next_cycle()
            self._is_idle, self._idle_since_s, self._num_unparsed = True, self._loop.time(), 0
            self._upstream.keep(self)
        else:
            self.close()

    def close(self) -> None:
        """Close the connection at once."""
        if self._lost is None:
            self._lost = UpstreamLost("the connection was closed")
        self._upstream.forget(self)
        self._transport.abort()
        self._changed.set()

    # ---- parts ----

    def _write_head(self, method: str, target: bytes, headers: Headers, body: bytes) -> None:
        fields = [(b"host", self._upstream.authority), *headers]
        if body or method in ("POST", "PUT", "PATCH"):
            fields.append((b"content-length", str(len(body)).encode()))
        head = self._http.send(h11.Request(method=method, target=target, headers=fields)) or b""
        # The parser has the whole request now; `_send_body` sends it.
        for event in (h11.Data(data=body), h11.EndOfMessage()) if body else (h11.EndOfMessage(),):
            self._http.send(event)
        self._transport.write(head)

    async def _send_body(self, body: bytes) -> h11.Response | None:
        """Send a body in pieces; return the head of an answer that arrives before all of it was sent."""
        for start in range(0, len(body), PIECE_BYTES):
            self._transport.write(memoryview(body)[start : start + PIECE_BYTES])
            while not self._can_write or self._lost is not None:
                event = self.arrived_event()
                if isinstance(event, h11.Response):
                    self._is_sent = False
                    return event
                if event is h11.NEED_DATA:
                    await self._wait(SEND_S, "the server has read more of the request")
        return None

    async def _head(self) -> h11.Response:
        """Wait for the head of the answer; once its first byte has arrived, for a limited time."""
        head_by_s: float | None = None
        while not isinstance(event := self.arrived_event(), h11.Response):
            if event is not h11.NEED_DATA:
                head_by_s = None
                continue
            if head_by_s is None and self._http.trailing_data[0]:
                head_by_s = self._loop.time() + HEAD_S
            limit_s = None if head_by_s is None else head_by_s - self._loop.time()
            await self._wait(limit_s, "the head of the answer was complete")
        return event

    async def _wait(self, limit_s: float | None, until: str) -> None:
        """Wait until something has changed.

        Raises:
            UpstreamLost: nothing has changed in time.
        """
        self._changed.clear()
        if limit_s is None:
            await self._changed.wait()
            return
        try:
            async with asyncio.timeout(limit_s):
                await self._changed.wait()
        except TimeoutError as error:
            self.close()
            raise UpstreamLost(f"it took too long until {until}") from error


class HeadedAnswer:
    """Status and headers of an answer, whose body comes in some way of its own.

    Args:
        status: status.
        headers: headers, with names in lower case.
    """

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.headers = headers

    def header(self, name: bytes) -> bytes:
        """Return the value of a header; empty if it is missing."""
        return next((value for key, value in self.headers if key == name), b"")


async def read_whole(parts: AsyncIterator[bytes], max_bytes: int, what: str) -> bytes:
    """Return a body.

    Args:
        parts: its parts.
        max_bytes: limit of its bytes.
        what: the answer, for the error.

    Raises:
        UpstreamLost: the body is not whole, or longer than the limit.
    """
    body = bytearray()
    async for part in parts:
        body += part
        if len(body) > max_bytes:
            raise UpstreamDamaged(f"{what} has more than {max_bytes} bytes")
    return bytes(body)


class UpstreamResponse(HeadedAnswer):
    """The answer to a request."""

    def __init__(self, connection: UpstreamConnection, head: h11.Response) -> None:
        super().__init__(head.status_code, [(bytes(name), bytes(value)) for name, value in head.headers])
        self._connection: UpstreamConnection | None = connection

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body as they arrive; parts that arrive together are joined, to be sent together.

        Raises:
            UpstreamLost: the body is not whole.
        """
        while (connection := self._connection) is not None:
            data, num_joined, lost = bytearray(), 0, None
            event = await connection.next_event()
            try:
                while isinstance(event, h11.Data):
                    data += event.data
                    num_joined += 1
                    if num_joined == MAX_JOINED:
                        await asyncio.sleep(0)
                        break
                    event = connection.arrived_event()
                if isinstance(event, h11.EndOfMessage):
                    self._connection = None
                    connection.finish()
            except UpstreamLost as error:
                lost = error
            if data:
                yield bytes(data)
            if lost is not None:
                raise lost

    def close(self) -> None:
        """Abandon the answer, unless it was read to its end; the server then ends the request."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
