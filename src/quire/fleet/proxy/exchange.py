"""A forwarded request: its body, the server that it is sent to, and the answer on its way back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from quire.fleet.proxy.streams import EventCutter, error_event
from quire.fleet.proxy.upstream import UpstreamDamaged, UpstreamLost
from quire.server.requests.errors import SHOWN_ID, ApiError, unavailable

logger = logging.getLogger(__name__)

REPLICA_HEADER: Final = b"x-quire-replica"
# Headers of one connection (RFC 9110), and headers that each side writes itself.
HOP_BY_HOP: Final = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"host", b"content-length", b"expect", b"x-request-id", b"date", b"server", REPLICA_HEADER),
    }
)
# Statuses of a server that cannot take the request now; another server may.
BUSY: Final = (429, 503)
# Limit of all bodies of requests together.
MAX_BODY_BYTES: Final = 1 << 30
# Bytes of an answer that is no stream, until which it is sent only when it is whole.
MAX_WHOLE_BYTES: Final = 1 << 20


class Answer(Protocol):
    """The answer of a server whose head has arrived.

    Attributes:
        status: status.
        headers: headers, with names in lower case.
    """

    status: int
    headers: list[tuple[bytes, bytes]]

    def header(self, name: bytes) -> bytes:
        """Return the value of a header; empty if it is missing."""

    def parts(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body as they arrive; raises `UpstreamLost` if it is incomplete."""

    def close(self) -> None:
        """Abandon the answer, unless it was read to its end."""


class Requester(Protocol):
    """Sender of requests to one server, or to one of several."""

    async def request(self, method: str, target: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> Answer:
        """Send a request and return its answer; raises `UpstreamLost` without an answer."""


class BodyBudget:
    """The bodies of open requests, with a limit for all together."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self.num_bytes = 0

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body of a request."""
        declared = Headers(scope=scope).get("content-length", "")
        parts: list[bytes] = []
        num_bytes = int(declared) if declared.isdigit() else 0
        if num_bytes <= self._max_body_bytes:
            num_bytes = 0
            async for part in Request(scope, receive).stream():
                parts.append(part)
                num_bytes += len(part)
                if num_bytes > self._max_body_bytes:
                    break
        if num_bytes > self._max_body_bytes:
            raise ApiError(413, f"the body is longer than {self._max_body_bytes} bytes", code="content_too_large")
        if self.num_bytes + num_bytes > MAX_BODY_BYTES:
            raise unavailable("too many long bodies are on their way", "too_many_uploads")
        return b"".join(parts)

    @asynccontextmanager
    async def open(self, scope: Scope, receive: Receive, send: Send) -> AsyncIterator[Exchange]:
        """Read the body of a request, and count its bytes while the exchange is open; see `read`."""
        body = await self.read(scope, receive)
        self.num_bytes += len(body)
        exchange = Exchange(scope, body, receive, send)
        try:
            yield exchange
        except UpstreamLost as error:
            if exchange.has_begun:
                await exchange.cut_off(str(error))
            else:
                raise ApiError(502, f"a server has failed: {error}", code="bad_gateway") from error
        finally:
            exchange.close()
            self.num_bytes -= len(body)


class Exchange:
    """One request of a client, and the progress of its answer.

    Args:
        scope: ASGI's scope.
        body: body of the request, read to its end.
        receive: ASGI's function that tells when the client has left.
        send: ASGI's function that sends the answer.

    Attributes:
        has_begun: True once a part of the answer was sent.
        last_busy: status and Retry-After of the last server that was busy.
        last_damage: the fault of the last damaged answer; empty without one.
    """

    def __init__(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        self.path: str = scope["path"]
        self.headers = Headers(scope=scope)
        self.body = body
        self.request_id: str = scope.get(SHOWN_ID, "")
        self.has_begun = False
        self.last_busy: tuple[int, bytes] | None = None
        self.last_damage = ""
        self.method: str = scope["method"]
        query = scope.get("query_string", b"")
        self._target = scope.get("raw_path", self.path.encode()) + (b"?" + query if query else b"")
        self._raw = scope["headers"]
        self._send = send
        self._is_stream = False
        self._receive = receive
        self._left: asyncio.Future[None] | None = None

    async def send_to(self, upstream: Requester) -> Answer:
        """Send the request to a server and return its answer once the head has arrived.

        Raises:
            UpstreamLost: there is none.
        """
        headers = [*_end_to_end(self._raw), (b"x-request-id", self.request_id.encode())]
        return await upstream.request(self.method, self._target, headers, self.body)

    async def attempt(
        self,
        upstream: Requester,
        replica: Callable[[], str],
        on_stream: Callable[[], None],
        on_lost: Callable[[UpstreamLost], None],
    ) -> str:
        """Have a server answer the request; return "answered", "left", "busy", "lost" or "cut off".

        Args:
            upstream: sender of the request.
            replica: function that returns the server's name, once the head of its answer has arrived.
            on_stream: function that is called with the first part of a stream.
            on_lost: function that is called where the server is lost.

        Returns:
            How it ended: "answered", "left" by the client, "busy", "lost" before the first byte, or "cut off".
        """
        answer: Answer | None = None
        cutter: EventCutter | None = None
        try:
            answer = await self.unless_left(self.send_to(upstream))
            if answer is None:
                return "left"
            if answer.status in BUSY:
                self.last_busy = (answer.status, answer.header(b"retry-after"))
                return "busy"
            cutter = EventCutter(answer.header(b"content-type"))
            # An answer in one piece arrives with its last token.
            is_whole = await self.relay(answer, replica(), cutter, on_stream if cutter.is_stream else None)
            return "answered" if is_whole else "left"
        except UpstreamLost as error:
            on_lost(error)
            if isinstance(error, UpstreamDamaged):
                self.last_damage = str(error)
            logger.warning("request %s was lost with %s: %s", self.request_id, replica(), error)
            if not self.has_begun:
                return "lost"
            if cutter is not None and cutter.has_last_event(self.path):
                await self._send_body(b"", more=False)
                return "answered"
            await self.cut_off(f"the server of this request was lost: {error}")
            return "cut off"
        finally:
            if answer is not None:
                answer.close()

    async def unless_left(self, work: Any) -> Any:
        """Return the result of a coroutine; cancel it and return None if the client leaves first."""
        if self._left is None:
            self._left = asyncio.ensure_future(self._wait_until_left())
        if self._left.done():
            work.close()
            return None
        # Like `asyncio.timeout`, because a task for each part of an answer took a quarter of the proxy's time.
        task = asyncio.current_task()
        assert task is not None
        num_cancelled, is_cancelled_here = task.cancelling(), False

        def cancel(_: asyncio.Future[None]) -> None:
            nonlocal is_cancelled_here
            is_cancelled_here = task.cancel()

        self._left.add_done_callback(cancel)
        result = None
        try:
            result = await work
        except asyncio.CancelledError:
            if not is_cancelled_here or task.cancelling() > num_cancelled + 1:
                raise
        finally:
            self._left.remove_done_callback(cancel)
            if is_cancelled_here:
                task.uncancel()
        return result

    async def relay(
        self,
        response: Answer,
        replica: str,
        cutter: EventCutter | None = None,
        on_first_part: Callable[[], None] | None = None,
    ) -> bool:
        """Send a server's answer to the client, the head with the first part; return False if the client leaves.

        An answer that is no stream is sent when it is whole, or has `MAX_WHOLE_BYTES`: until then another server may
        still answer.

        Returns:
            False where the client has left.

        Raises:
            UpstreamLost: the answer is not whole.
        """
        cutter = cutter or EventCutter(response.header(b"content-type"))
        self._is_stream = cutter.is_stream
        parts, held = response.parts(), bytearray()
        while True:
            part = await self.unless_left(_next_part(parts))
            if part is None and self._left is not None and self._left.done():
                return False
            data = cutter.finish(self.path) if part is None else cutter.add(part)
            if not cutter.is_stream and not self.has_begun:
                held += data
                if part is not None and len(held) <= MAX_WHOLE_BYTES:
                    continue
                data = bytes(held)
                held.clear()
            if not self.has_begun and (data or part is None):
                if on_first_part is not None:
                    on_first_part()
                self.has_begun = True
                await self._begin(response, replica)
            if data or part is None:
                await self._send_body(data, more=part is not None)
            if part is None:
                return True

    async def cut_off(self, why: str) -> None:
        """End an answer that has begun: a stream with an error, another answer by closing the connection.

        Raises:
            ConnectionError: it is no stream; the client sees that the answer is not whole.
        """
        if not self._is_stream:
            raise ConnectionAbortedError(why)
        error = ApiError(503, why, code="replica_lost", headers={"Retry-After": "1"})
        await self._send_body(error_event(self.path, error), more=False)

    async def give_up(self, was_tried: bool) -> None:
        """Refuse the request: no server can take it now.

        Raises:
            ApiError: 429 or 503 with Retry-After; 502 if an answer was damaged.
        """
        if self.last_busy is not None:
            status, retry_after = self.last_busy
            raise ApiError(
                status,
                "all servers are busy",
                code="queue_full" if status == 429 else "busy",
                headers={"Retry-After": retry_after.decode("latin-1") or "1"},
            )
        if self.last_damage:
            raise ApiError(502, f"a server has failed: {self.last_damage}", code="bad_gateway")
        why = "every server that could take this request was lost" if was_tried else "no server takes requests"
        raise unavailable(why, "no_replica")

    async def _begin(self, response: Answer, replica: str) -> None:
        headers = _end_to_end(response.headers)
        if length := response.header(b"content-length"):
            headers.append((b"content-length", length))
        headers.append((REPLICA_HEADER, replica.encode()))
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})

    async def _send_body(self, data: bytes, *, more: bool) -> None:
        message: Message = {"type": "http.response.body", "body": data, "more_body": more}
        await self._send(message)

    async def _wait_until_left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def close(self) -> None:
        """Stop waiting for the client to leave."""
        if self._left is not None:
            self._left.cancel()


async def _next_part(parts: AsyncIterator[bytes]) -> bytes | None:
    """Return the next part of a body; None after the last one."""
    return await anext(parts, None)


def _end_to_end(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers that are forwarded: none of one connection, nor those that `Connection` names."""
    named = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")}
    return [(key, value) for key, value in headers if key not in HOP_BY_HOP and key not in named]
