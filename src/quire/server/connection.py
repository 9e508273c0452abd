"""HTTP connections: uvicorn's, with bounds on time, number and bytes, and no doubt about where a request ends."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import re
import socket
import termios
import uuid
from array import array
from typing import Any, cast

import h11
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from quire.server.errors import REQUEST_ID, ApiError, no_room

logger = logging.getLogger(__name__)

# A request that is long may take longer to arrive: this fast at least, in bytes a second.
SLOWEST_UPLOAD = 16 << 10
CHECK_INTERVAL_S = 1.0
# Reading a chunk takes 10 us whatever is in it, and all chunks of one read (256 KiB) are read in one turn of the event
# loop: this many are free, beyond them a body's chunks must have so many bytes on average. A turn then takes 50 ms.
FREE_CHUNKS = 1024
SMALLEST_CHUNK = 64
# Bytes of a request line and headers. h11 has this limit for what is not complete yet, however it arrives.
MAX_HEAD = 16 << 10
END_OF_HEAD = re.compile(rb"\n\r?\n")
# A client that has closed its connection, not only its half of it, answers a write with a reset: after a round trip.
RESET_AFTER_S = 0.1


class Connections:
    """The open connections of a server.

    Args:
        limit: how many there may be.
        receive_timeout_s: in which a request must arrive, `SLOWEST_UPLOAD` apart; also the first of a connection.
        send_timeout_s: in which a client must take something of what is sent to it.
        keep_alive_timeout_s: that a connection stays open behind an answer.
    """

    def __init__(
        self, limit: int, receive_timeout_s: float, send_timeout_s: float, keep_alive_timeout_s: float
    ) -> None:
        self.limit = limit
        self.receive_timeout_s = receive_timeout_s
        self.send_timeout_s = send_timeout_s
        self.keep_alive_timeout_s = keep_alive_timeout_s
        self.is_draining = False
        self._open: set[Connection] = set()
        # Those without a request, and those whose request's body is on its way; the longest so first.
        self._idle: dict[Connection, None] = {}
        self._uploading: dict[Connection, None] = {}

    def make_room(self, num_opening: int = 0) -> bool:
        """See that there is room for one more; a connection without a whole request is closed for it.

        Args:
            num_opening: connections that will be added soon.

        Returns:
            False where all have whole requests.
        """
        if len(self._open) + num_opening < self.limit:
            return True
        connection = next(iter(self._idle), None) or next(iter(self._uploading), None)
        if connection is None:
            return False
        self.discard(connection)
        connection.refuse(no_room())
        connection.abort()
        return True

    def add(self, connection: Connection) -> None:
        """Note a new connection."""
        self._open.add(connection)
        self._idle[connection] = None

    def discard(self, connection: Connection) -> None:
        """Forget a connection."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        self._uploading.pop(connection, None)

    def note(self, connection: Connection, *, is_idle: bool, is_uploading: bool) -> None:
        """Note whether a connection waits for a request, or for the rest of a request's body."""
        for is_so, those in ((is_idle, self._idle), (is_uploading, self._uploading)):
            if not is_so:
                those.pop(connection, None)
            elif connection in self._open:
                those.setdefault(connection)

    async def watch(self) -> None:
        """Close connections whose time is over, for ever."""
        shortest_s = min(self.receive_timeout_s, self.send_timeout_s, self.keep_alive_timeout_s)
        interval_s = min(CHECK_INTERVAL_S, shortest_s / 4)
        while True:
            await asyncio.sleep(interval_s)
            for connection in tuple(self._open):
                try:
                    connection.check()
                except Exception:
                    # The time limits of all others go on.
                    logger.exception("a connection's check failed, so it is closed")
                    connection.abort()

    def drain(self) -> None:
        """Have every connection end behind its next answer, from now on."""
        self.is_draining = True
        for connection in tuple(self._open):
            connection.end_behind_answer()


class Connection(H11Protocol):
    """One connection.

    Args:
        connections: all of the server's.
        options: what uvicorn gives its protocols.
    """

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self.conn = StrictConnection(h11.SERVER)
        self._all = connections
        self._written: CountingTransport
        # Until when more of the next request must be there, and until when all of it; None while one is answered.
        self._receive_by_s: float | None = None
        self._complete_by_s: float | None = None
        self._num_sent = 0
        self._send_by_s = 0.0
        self._is_half_closed = False
        # When the last interim response was sent.
        self._interim_at_s = 0.0

    # ---- what asyncio tells ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Note the connection, and give it the time to send a request."""
        self._written = CountingTransport(transport)
        super().connection_made(cast(asyncio.Transport, self._written))
        self._all.add(self)
        self._receive_by_s = self._complete_by_s = self.loop.time() + self._all.receive_timeout_s

    def data_received(self, data: bytes) -> None:
        """Take bytes; each moves the moment at which the request must be there."""
        if self._is_between_requests:
            self._complete_by_s = self.loop.time() + self._all.receive_timeout_s
        super().data_received(data)
        self._note_request(len(data))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Go on where a client has sent its request, closed its half of the connection, and waits for the answer.

        A client that has closed all of it looks the same, until something is sent to it: an interim response. Behind a
        proxy that passes bytes on, the proxy's kernel takes the first one, and only the next one fails; so they go on
        until the answer begins.

        Returns:
            False where nothing is left to answer; the connection is then closed.
        """
        if self._is_half_closed:
            return True  # told again, once reading was resumed
        # HTTP/1.0 has no interim responses.
        if not self._is_answering or self.cycle.more_body or self.scope["http_version"] != "1.1":
            return False
        self._is_half_closed = True
        self._send_interim()
        self.loop.call_later(RESET_AFTER_S, self._check_reset)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._all.discard(self)
        super().connection_lost(exc)

    # ---- what uvicorn tells ----

    def handle_events(self) -> None:
        """Take what has arrived apart."""
        super().handle_events()
        if self._all.is_draining:
            self.end_behind_answer()

    def on_response_complete(self) -> None:
        """Wait for the next request, which may be there already."""
        super().on_response_complete()
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            return
        self._note_request(0)
        if self._is_half_closed and not self._is_answering:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's signature
        """Refuse what is not HTTP."""
        self.refuse(ApiError(400, "this is not a valid HTTP request", code="invalid_http"))

    def shutdown(self) -> None:
        """End the connection, or let its request be the last one."""
        with contextlib.suppress(h11.LocalProtocolError):
            super().shutdown()

    # ---- ends ----

    def check(self) -> None:
        """End the connection if the client has not sent or taken in time what it should have, or has gone."""
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

    def end_behind_answer(self) -> None:
        """Let the request that is answered, if there is one, be the last; the client is told where that can be."""
        if self._is_answering and self.cycle.keep_alive:
            self.cycle.keep_alive = False
            if not self.cycle.response_started:
                self.cycle.default_headers = [*self.cycle.default_headers, CLOSE_HEADER]

    def refuse(self, error: ApiError) -> None:
        """Send an error, unless nothing was asked or an answer has begun, and close the connection."""
        can_answer = self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing()
        if can_answer and not self._is_between_requests:
            with contextlib.suppress(h11.LocalProtocolError):
                self.transport.write(self._encode(error))
        if self._is_answering:
            # Before its next step: what it would send has no place any more.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def abort(self) -> None:
        """Close the connection at once; what was not sent is lost."""
        self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    @property
    def _is_between_requests(self) -> bool:
        """Whether nothing of the next request is there."""
        return self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]

    def _note_request(self, num_bytes: int) -> None:
        """Set the time for what is to arrive, after `num_bytes` have."""
        is_whole = self._is_answering and not self.cycle.more_body
        self._all.note(self, is_idle=not self._is_answering, is_uploading=self._is_answering and not is_whole)
        now = self.loop.time()
        if is_whole:
            self._receive_by_s = self._complete_by_s = None
        elif self._is_between_requests:
            self._receive_by_s = self._complete_by_s = now + self._all.keep_alive_timeout_s
        else:
            silent_by_s = now + self._all.receive_timeout_s
            if self.conn.our_state is not h11.DONE:
                # What arrives earns time for all of it, but none to fall silent in.
                self._complete_by_s = (self._complete_by_s or silent_by_s) + num_bytes / SLOWEST_UPLOAD
            elif not num_bytes:
                # Answered before its body has come: the rest is thrown away, but not for ever.
                self._complete_by_s = silent_by_s
            self._receive_by_s = min(self._complete_by_s or silent_by_s, silent_by_s)

    def _send_interim(self) -> None:
        """Send an interim response to a half-closed connection that waits for its answer."""
        # HTTP/1.0 has none.
        if self._is_answering and not self.cycle.response_started and self.scope["http_version"] == "1.1":
            self._interim_at_s = self.loop.time()
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(interim) or b"")

    def _check_reset(self) -> None:
        """See whether a half-closed connection is gone altogether; its end is not told once nothing is read."""
        peer = self.transport.get_extra_info("socket")
        if not self.transport.is_closing() and peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.abort()

    def _encode(self, error: ApiError) -> bytes:
        body = json.dumps(error.body()).encode()
        # The guard has given it one, unless it had no turn since.
        scope = cast(dict[str, Any], self.scope) if self._is_answering else {}
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "x-request-id": scope.get(REQUEST_ID) or uuid.uuid4().hex,
            "connection": "close",
            **error.headers,
        }
        events = [
            h11.Response(status_code=error.status, headers=list(headers.items())),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        if self._is_answering and self.scope["method"] == "HEAD":
            del events[1]  # the body is left out, its length is told
        return b"".join(self.conn.send(event) or b"" for event in events)


class StrictConnection(h11.Connection):
    """Refuses what two servers might read differently: then a gateway could let through a request that it has not seen.

    And what would take long to read: the event loop has no turn in between.

    h11 refuses most of it by itself. Two equal `Content-Length`, a header folded over lines and a bare line feed at the
    end of one have a single meaning by RFC 9112, and are accepted.
    """

    def __init__(self, our_role: type[h11.SERVER]) -> None:
        super().__init__(our_role, MAX_HEAD)
        # Of the body that is read now.
        self._num_chunks = 0
        self._num_bytes = 0

    def next_event(self) -> Any:
        """Return the next event.

        Raises:
            h11.RemoteProtocolError: not HTTP; a chunked body that has a length too, or is sent with HTTP/1.0; headers
                of more than `MAX_HEAD` bytes; or chunks of less than `SMALLEST_CHUNK` bytes on average.
        """
        if self.their_state is h11.IDLE and self._has_long_head():
            raise h11.RemoteProtocolError(f"the request line and headers have more than {MAX_HEAD} bytes")
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version != b"1.1"):
                raise h11.RemoteProtocolError("Transfer-Encoding beside Content-Length, or in HTTP/1.0")
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            # A chunk that comes in many pieces is one: pieces are no more than reads.
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > FREE_CHUNKS + self._num_bytes // SMALLEST_CHUNK:
                raise h11.RemoteProtocolError(f"chunks of less than {SMALLEST_CHUNK} bytes")
        return event

    def _has_long_head(self) -> bool:
        arrived, _ = self.trailing_data
        return len(arrived) > MAX_HEAD and not END_OF_HEAD.search(arrived, 0, MAX_HEAD)


class CountingTransport:
    """A transport that counts what it sends.

    Args:
        transport: does all else.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._num_written = 0

    @property
    def num_sent(self) -> int:
        """Bytes that the client has taken; where the system does not tell, those that the system has."""
        return self._num_written - self._transport.get_write_buffer_size() - self._num_in_kernel()

    def _num_in_kernel(self) -> int:
        # The kernel keeps some megabytes, and asks for more only once a good part of them has gone.
        count = array("i", [0])
        try:
            fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, count)
        except (OSError, AttributeError):
            return 0
        return count[0]

    def write(self, data: bytes) -> None:
        """Send bytes, as soon as the client takes them."""
        self._num_written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
