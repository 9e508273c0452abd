"""uvicorn's HTTP connections with limits on time, number and bytes, and unambiguous request boundaries."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import uuid
from typing import Any, cast

import h11
from h11._writers import ChunkedWriter
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from quire.server.http.strict import StrictParser
from quire.server.http.transport import BODY_WRITER, BodyWriter, CountingTransport
from quire.server.requests.errors import SHOWN_ID, ApiError, too_many_connections

logger = logging.getLogger(__name__)

# Minimum upload rate in bytes per second; it extends the deadline of a long request.
MIN_UPLOAD_RATE = 16 << 10
CHECK_INTERVAL_S = 1.0
# Parsing a chunk takes 10 us at any size, and all chunks of one read (256 KiB) are parsed in one turn of the event
# loop. Beyond the free chunks, a body's chunks must have `MIN_MEAN_CHUNK` bytes on average: a turn then takes 50 ms.
FREE_CHUNKS = 1024
MIN_MEAN_CHUNK = 64
# A client that has closed both halves of its connection answers a write with a reset, after a round trip.
RESET_AFTER_S = 0.1


class Connections:
    """The open connections of a server."""

    def __init__(
        self, limit: int, receive_timeout_s: float, send_timeout_s: float, keep_alive_timeout_s: float
    ) -> None:
        self.limit = limit
        self.receive_timeout_s = receive_timeout_s
        self.send_timeout_s = send_timeout_s
        self.keep_alive_timeout_s = keep_alive_timeout_s
        self.is_draining = False
        # Accepted connections that are not open yet, and open ones; each connection is in one of the two.
        self._opening: set[Connection] = set()
        self._open: set[Connection] = set()
        # Connections without a request, and connections whose request body is arriving; each in order of entry.
        self._idle: dict[Connection, None] = {}
        self._uploading: dict[Connection, None] = {}

    def make_room(self) -> bool:
        """Make room for one more connection by closing one without a complete request."""
        if len(self._open) + len(self._opening) < self.limit:
            return True
        connection = next(iter(self._idle), None) or next(iter(self._uploading), None)
        if connection is None:
            return False
        self.discard(connection)
        connection.refuse(too_many_connections())
        connection.abort()
        return True

    def begin_opening(self, connection: Connection) -> None:
        """Count an accepted connection from now on, until it is open or `end_opening` says that it has failed."""
        self._opening.add(connection)

    def end_opening(self, connection: Connection) -> None:
        """Stop counting an accepted connection that is not open."""
        self._opening.discard(connection)

    def add(self, connection: Connection) -> None:
        """Add a new connection."""
        self._opening.discard(connection)
        self._open.add(connection)
        self._idle[connection] = None

    def discard(self, connection: Connection) -> None:
        """Remove a connection."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._uploading.pop(connection, None)

    def set_state(self, connection: Connection, *, is_idle: bool, is_uploading: bool) -> None:
        """Record whether a connection waits for a request, or for the rest of a request's body."""
        for is_member, members in ((is_idle, self._idle), (is_uploading, self._uploading)):
            if not is_member:
                members.pop(connection, None)
            elif connection in self._open:
                members.setdefault(connection)

    async def watch(self) -> None:
        """Close connections that exceed a time limit, until cancelled."""
        shortest_s = min(self.receive_timeout_s, self.send_timeout_s, self.keep_alive_timeout_s)
        interval_s = min(CHECK_INTERVAL_S, shortest_s / 4)
        while True:
            await asyncio.sleep(interval_s)
            for connection in tuple(self._open):
                try:
                    connection.check()
                except Exception:
                    # The time limits of the other connections must stay enforced.
                    logger.exception("a connection's check failed, so it is closed")
                    connection.abort()

    def drain(self) -> None:
        """Close every connection after its next answer, from now on."""
        self.is_draining = True
        for connection in tuple(self._open):
            connection.close_after_answer()


class Connection(H11Protocol):
    """One connection."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self.conn = StrictConnection(h11.SERVER)
        self._all = connections
        self._written: CountingTransport
        # Deadlines of the next bytes and of the complete next request; None while a request is answered.
        self._receive_by_s: float | None = None
        self._complete_by_s: float | None = None
        self._num_sent = 0
        self._send_by_s = 0.0
        self._is_half_closed = False
        # When the last interim response was sent.
        self._interim_at_s = 0.0

    # ---- callbacks of asyncio ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection and set its first deadline."""
        self._written = CountingTransport(transport)
        super().connection_made(cast(asyncio.Transport, self._written))
        self._all.add(self)
        self._receive_by_s = self._complete_by_s = self.loop.time() + self._all.receive_timeout_s

    def data_received(self, data: bytes) -> None:
        """Take bytes, and move the deadline of the request."""
        if self._is_between_requests:
            self._complete_by_s = self.loop.time() + self._all.receive_timeout_s
        super().data_received(data)
        self._update_deadlines(len(data))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Continue if a client has sent its request, closed its half of the connection, and waits for the answer.

        A client that has closed both halves looks the same until data is sent to it, so interim responses are sent
        until the answer begins. One is not enough: if a proxy forwards bytes, its kernel takes the first one, and only
        the next one fails.
        """
        if self._is_half_closed:
            return True  # asyncio calls again after reading was resumed
        # HTTP/1.0 has no interim responses.
        if not self._is_answering or self.cycle.more_body or self.scope["http_version"] != "1.1":
            return False
        self._is_half_closed = True
        self._send_interim()
        self.loop.call_later(RESET_AFTER_S, self._check_reset)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the open ones."""
        self._all.discard(self)
        super().connection_lost(exc)

    # ---- callbacks of uvicorn ----

    def handle_events(self) -> None:
        """Parse the bytes that have arrived."""
        super().handle_events()
        if self._is_answering:
            cast(dict[str, Any], self.scope).setdefault(BODY_WRITER, BodyWriter(self.cycle, self._written))
        if self._all.is_draining:
            self.close_after_answer()

    def on_response_complete(self) -> None:
        """Wait for the next request, which may have arrived already."""
        super().on_response_complete()
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            return
        self._update_deadlines(0)
        if self._is_half_closed and not self._is_answering:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's signature
        """Refuse bytes that are not valid HTTP."""
        self.refuse(ApiError(400, "this is not a valid HTTP request", code="invalid_http"))

    def shutdown(self) -> None:
        """Close the connection, at the latest after its current request."""
        with contextlib.suppress(h11.LocalProtocolError):
            super().shutdown()

    # ---- ends ----

    def check(self) -> None:
        """Close the connection if the client exceeds a time limit of sending or reading, or has left."""
        if self.transport.is_closing() and not self.transport.get_write_buffer_size():
            return
        now = self.loop.time()
        if self._receive_by_s is not None and now > self._receive_by_s:
            self._receive_by_s = None
            self.refuse(ApiError(408, "the request did not arrive in time", code="request_timeout"))
        num_sent = self._written.num_sent
        if num_sent > self._num_sent or not self.transport.get_write_buffer_size():
            self._num_sent, self._send_by_s = num_sent, now + self._all.send_timeout_s
        elif now > self._send_by_s:
            self.abort()
        if self._is_half_closed:
            if now > self._interim_at_s + CHECK_INTERVAL_S:
                self._send_interim()
            self._check_reset()

    def close_after_answer(self) -> None:
        """Make the request in progress the last one, with `Connection: close` unless its answer has begun."""
        if self._is_answering and self.cycle.keep_alive:
            self.cycle.keep_alive = False
            if not self.cycle.response_started:
                self.cycle.default_headers = [*self.cycle.default_headers, CLOSE_HEADER]

    def refuse(self, error: ApiError) -> None:
        """Close the connection, with an error answer if a request has arrived and its answer has not begun."""
        can_answer = self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing()
        if can_answer and not self._is_between_requests:
            with contextlib.suppress(h11.LocalProtocolError):
                self.transport.write(self._encode(error))
        if self._is_answering:
            # The handler must stop before its next step: its output can no longer be sent.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def abort(self) -> None:
        """Close the connection at once; unsent data is lost."""
        self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    @property
    def _is_between_requests(self) -> bool:
        """True if no byte of the next request has arrived."""
        return self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]

    def _update_deadlines(self, num_bytes: int) -> None:
        """Update the deadlines after `num_bytes` have arrived."""
        is_whole = self._is_answering and not self.cycle.more_body
        self._all.set_state(self, is_idle=not self._is_answering, is_uploading=self._is_answering and not is_whole)
        now = self.loop.time()
        if is_whole:
            self._receive_by_s = self._complete_by_s = None
        elif self._is_between_requests:
            self._receive_by_s = self._complete_by_s = now + self._all.keep_alive_timeout_s
        else:
            silent_by_s = now + self._all.receive_timeout_s
            if self.conn.our_state is not h11.DONE:
                # Arriving bytes extend the deadline of the whole request, but not the limit on silence.
                self._complete_by_s = (self._complete_by_s or silent_by_s) + num_bytes / MIN_UPLOAD_RATE
            elif not num_bytes:
                # The request is answered before its body has arrived; the rest is discarded, for a limited time.
                self._complete_by_s = silent_by_s
            self._receive_by_s = min(self._complete_by_s or silent_by_s, silent_by_s)

    def _send_interim(self) -> None:
        """Send an interim response to a half-closed connection that waits for its answer."""
        if self._is_answering and not self.cycle.response_started and self.scope["http_version"] == "1.1":
            self._interim_at_s = self.loop.time()
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(interim) or b"")

    def _check_reset(self) -> None:
        """Abort a half-closed connection that was reset; asyncio does not report a reset while nothing is read."""
        peer = self.transport.get_extra_info("socket")
        if not self.transport.is_closing() and peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.abort()

    def _encode(self, error: ApiError) -> bytes:
        body = json.dumps(error.body()).encode()
        # The guard has not set the request id if it has had no turn yet.
        scope = cast(dict[str, Any], self.scope) if self._is_answering else {}
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": scope.get(SHOWN_ID) or uuid.uuid4().hex,
            "connection": "close",
            **error.headers,
        }
        events = [
            h11.Response(status_code=error.status, headers=list(headers.items())),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        if self._is_answering and self.scope["method"] == "HEAD":
            del events[1]  # the answer to HEAD has the body's length only
        return b"".join(self.conn.send(event) or b"" for event in events)


class StrictConnection(StrictParser):
    """A parser of requests that also refuses those that take long to parse, since parsing blocks the event loop."""

    def __init__(self, our_role: type[h11.SERVER]) -> None:
        super().__init__(our_role)
        # Chunks and bytes of the current body.
        self._num_chunks = 0
        self._num_bytes = 0

    def next_event(self) -> Any:
        """Return the next event."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            # The pieces of one chunk count as one: there are no more pieces than reads.
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > FREE_CHUNKS + self._num_bytes // MIN_MEAN_CHUNK:
                raise h11.RemoteProtocolError(f"chunks of less than {MIN_MEAN_CHUNK} bytes")
        return event

    def send(self, event: Any) -> Any:
        """Return the bytes of an event; a chunk of a body, which changes no state of h11, is framed here."""
        if isinstance(event, h11.Data) and event.data and isinstance(self._writer, ChunkedWriter):
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        return super().send(event)
