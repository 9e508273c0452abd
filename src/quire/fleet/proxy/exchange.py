"""A forwarded request: its body, the server that it is sent to, and the answer on its way back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, Protocol

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from quire.fleet.proxy.streams import EventCutter, error_event
from quire.fleet.proxy.upstream import HeadedAnswer, UpstreamDamaged, UpstreamLate, UpstreamLost
from quire.server.requests.body import BodyReader
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
SERVER_LOST: Final = "the server of this request was lost"
# Beginning of the routes of single models.
MODELS: Final = "/v1/models/"
# Statuses of a server that cannot take the request now; another server may.
BUSY: Final = (429, 503)
# Statuses of a server that has failed on a request; another server may answer it.
FAILED: Final = (500, 502, 504)
# Limit of all bodies of requests together.
MAX_BODY_BYTES: Final = 1 << 30
# Integers in one list of a body. Servers know the context and the vocabulary of their models, and allow fewer.
MAX_INTEGERS: Final = 1 << 24
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


class ReadAnswer(HeadedAnswer):
    """An answer whose body was read to its end; see `Answer`."""

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        super().__init__(status, headers)
        self.body = body

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body."""
        yield self.body

    def close(self) -> None:
        """Do nothing."""


class Requester(Protocol):
    """Sender of requests to one server, or to one of several."""

    async def request(self, method: str, target: bytes, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> Answer:
        """Send a request and return its answer; raises `UpstreamLost` without an answer."""


class TimeLimits(NamedTuple):
    """Limits of the time in which a server sends nothing; None for no limit.

    Args:
        first_byte_s: seconds from the request to the first byte of its answer's body.
        idle_s: seconds between two parts of an answer.
    """

    first_byte_s: float | None = None
    idle_s: float | None = None


USUAL_LIMITS: Final = TimeLimits(None, 600.0)


class Exchanges:
    """The open exchanges, with a limit for all their bodies together.

    Args:
        bodies: reader of the bodies.
    """

    def __init__(self, bodies: BodyReader) -> None:
        self._bodies = bodies
        self._open: set[Exchange] = set()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._open)

    @asynccontextmanager
    async def open(self, scope: Scope, receive: Receive, send: Send) -> AsyncIterator[Exchange]:
        """Read the body of a request, and count its bytes while the exchange is open.

        Raises:
            ApiError: the body, or all bodies together, are too long; a server's answer was damaged.
        """
        body = await self._bodies.read(Request(scope, receive))
        if self._num_bytes + len(body) > MAX_BODY_BYTES:
            raise unavailable("too many long bodies are on their way", "too_many_uploads")
        exchange = Exchange(scope, body, receive, send)
        self._open.add(exchange)
        self._num_bytes += len(body)
        try:
            yield exchange
            if exchange.error is not None and not exchange.has_begun:
                raise exchange.error
        except UpstreamLost as error:
            if exchange.has_begun:
                await exchange.cut_off(unavailable(f"{SERVER_LOST}: {error}", "replica_lost"))
            else:
                raise ApiError(502, f"a server has failed: {error}", code="bad_gateway") from error
        finally:
            exchange.close()
            self._open.discard(exchange)
            self._num_bytes -= len(body)

    def end(self, error: ApiError) -> None:
        """End all open exchanges with an error."""
        for exchange in self._open:
            exchange.end(error)


class Exchange:
    """One request of a client, and the progress of its answer.

    Args:
        scope: ASGI's scope.
        body: body of the request, read to its end.
        receive: ASGI's function that tells when the client has left.
        send: ASGI's function that sends the answer.

    Attributes:
        request: the request, without its body.
        fields: fields of the body, once they were read.
        has_begun: True once a part of the answer was sent.
        last_busy: status and Retry-After of the last server that was busy.
        last_damage: the fault of the last damaged answer; empty without one.
        error: error that ends the exchange, None if its servers decide.
    """

    def __init__(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        self.path: str = scope["path"]
        self.request = Request(scope)
        self.headers = self.request.headers
        self.body = body
        self.request_id: str = scope.get(SHOWN_ID, "")
        self.fields: Mapping[str, Any] = {}
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
        # Ends when the client has left, or when it is to be told `error`.
        self._left: asyncio.Future[None] | None = None
        self.error: ApiError | None = None
        self._limits, self._started_s = USUAL_LIMITS, 0.0
        # Answer of a server that has failed, and the server's name.
        self._held: tuple[Answer, str] | None = None

    @property
    def model(self) -> str | None:
        """The model that the request names; None without one."""
        name = self.path.removeprefix(MODELS) if self.path.startswith(MODELS) else self.fields.get("model")
        return name if isinstance(name, str) and name else None

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
        on_begin: Callable[[bool], None],
        on_lost: Callable[[UpstreamLost], None],
        limits: TimeLimits = USUAL_LIMITS,
        *,
        holds_failures: bool = False,
    ) -> str:
        """Have a server answer the request, and return how it ended.

        Args:
            upstream: sender of the request.
            replica: function that returns the server's name, once the head of its answer has arrived.
            on_begin: function that is called with the first part of an answer, with True if it is a stream.
            on_lost: function that is called where the server is lost or late.
            limits: limits of the time in which the server sends nothing.
            holds_failures: True to hold an answer of a status in `FAILED` for `relay_held`, False to pass it on.

        Returns:
            "answered"; "left" by the client; "cut off" after the first byte; and before the first byte "busy",
            "failed" if the answer is held, "damaged", "refused" if the server got nothing of the request, "lost" or
            "late".
        """
        answer: Answer | None = None
        cutter: EventCutter | None = None
        self._limits, self._started_s = limits, asyncio.get_running_loop().time()
        try:
            answer = await self.unless_left(self.send_to(upstream), self._wait_s())
            if answer is None:
                return await self._end_early()
            if answer.status in BUSY:
                self.last_busy = (answer.status, answer.header(b"retry-after"))
                return "busy"
            if holds_failures and answer.status in FAILED:
                self._hold(answer, replica())
                answer = None
                return "failed"
            cutter = EventCutter(answer.header(b"content-type"))
            is_whole = await self.relay(answer, replica(), cutter, on_begin)
            return "answered" if is_whole else await self._end_early()
        except UpstreamLost as error:
            on_lost(error)
            what = "late" if isinstance(error, UpstreamLate) else "lost"
            if isinstance(error, UpstreamDamaged):
                what, self.last_damage = "damaged", str(error)
            logger.warning("request %s was %s with %s: %s", self.request_id, what, replica(), error)
            if not self.has_begun:
                return what if error.was_sent else "refused"
            if cutter is not None and cutter.has_last_event(self.path):
                await self._send_body(b"", more=False)
                return "answered"
            await self.cut_off(
                _late(error) if what == "late" else unavailable(f"{SERVER_LOST}: {error}", "replica_lost")
            )
            return "cut off"
        finally:
            if answer is not None:
                answer.close()

    async def unless_left(self, work: Any, limit_s: float | None = None) -> Any:
        """Return the result of a coroutine; cancel it and return None if the client leaves first.

        Raises:
            UpstreamLate: it takes longer than `limit_s`.
        """
        if self._left is None:
            self._left = asyncio.ensure_future(_wait_until_left(self._receive))
        if self._left.done():
            work.close()
            return None
        # Like `asyncio.timeout`, because a task for each part of an answer took a quarter of the proxy's time.
        task = asyncio.current_task()
        assert task is not None
        num_cancelled, num_cancelled_here, is_late = task.cancelling(), 0, False

        def cancel(*_: Any) -> None:
            nonlocal num_cancelled_here
            num_cancelled_here += task.cancel()

        def end() -> None:
            nonlocal is_late
            is_late = True
            cancel()

        self._left.add_done_callback(cancel)
        timer = None if limit_s is None else asyncio.get_running_loop().call_later(limit_s, end)
        result = None
        try:
            result = await work
        except asyncio.CancelledError:
            if not num_cancelled_here or task.cancelling() > num_cancelled + num_cancelled_here:
                raise
        finally:
            self._left.remove_done_callback(cancel)
            if timer is not None:
                timer.cancel()
            for _ in range(num_cancelled_here):
                task.uncancel()
        if is_late and result is None and not self._left.done():
            raise UpstreamLate(f"the server sent nothing for {limit_s:.1f} s")
        return result

    async def relay(
        self,
        response: Answer,
        replica: str,
        cutter: EventCutter | None = None,
        on_begin: Callable[[bool], None] | None = None,
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
            part = await self.unless_left(_next_part(parts), self._wait_s())
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
                if on_begin is not None:
                    on_begin(cutter.is_stream)
                self.has_begun = True
                await self._begin(response, replica)
            if data or part is None:
                await self._send_body(data, more=part is not None)
            if part is None:
                return True

    async def relay_held(self) -> bool:
        """Send the held answer of a server that has failed; return False if none is held, or it is lost."""
        if self._held is None:
            return False
        answer, replica = self._held
        try:
            await self.relay(answer, replica)
        except UpstreamLost as error:
            if self.has_begun:
                await self.cut_off(unavailable(f"{SERVER_LOST}: {error}", "replica_lost"))
        return self.has_begun

    async def cut_off(self, error: ApiError) -> None:
        """End an answer that has begun: a stream with an error, another answer by closing the connection.

        Raises:
            ConnectionError: it is no stream; the client sees that the answer is not whole.
        """
        if not self._is_stream:
            raise ConnectionAbortedError(str(error))
        await self._send_body(error_event(self.path, error), more=False)

    def end(self, error: ApiError) -> None:
        """End the exchange with an error: `attempt` stops waiting for its server."""
        self.error = error
        if self._left is None:
            self._left = asyncio.get_running_loop().create_future()
        self._left.cancel()

    async def give_up(self, was_tried: bool) -> None:
        """Answer with the held answer of a server that has failed; without one, refuse the request.

        Raises:
            ApiError: no server can take the request now: 429 or 503 with Retry-After; 502 if an answer was damaged.
        """
        if await self.relay_held():
            return
        if self.last_busy is not None:
            status, retry_after = self.last_busy
            raise ApiError(
                status,
                "the servers are busy",
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

    async def _end_early(self) -> str:
        """Return "left", or end an answer that has begun with the error that ends the exchange."""
        if self.error is None or not self.has_begun:
            return "left"
        await self.cut_off(self.error)
        return "cut off"

    def close(self) -> None:
        """Stop waiting for the client to leave, and abandon a held answer."""
        if self._left is not None:
            self._left.cancel()
            self._left = None
        self._drop_held()

    def late(self) -> ApiError:
        """Return the error of a request whose server has sent nothing within the limit."""
        return _late(f"the server sent nothing for {self._limits.first_byte_s:g} s")

    def _wait_s(self) -> float | None:
        """Return the time that the server has for the next part of the answer."""
        if self.has_begun or self._limits.first_byte_s is None:
            return self._limits.idle_s if self.has_begun else None
        return max(0.0, self._started_s + self._limits.first_byte_s - asyncio.get_running_loop().time())

    def _hold(self, answer: Answer, replica: str) -> None:
        self._drop_held()
        self._held = (answer, replica)

    def _drop_held(self) -> None:
        if self._held is not None:
            self._held[0].close()
            self._held = None


async def _wait_until_left(receive: Receive) -> None:
    """Return when the client has left.

    This is no method, because the exception of a cancelled task holds the frame: an exchange in it, with its body,
    would live until the collector's next full pass.
    """
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next_part(parts: AsyncIterator[bytes]) -> bytes | None:
    """Return the next part of a body; None after the last one."""
    return await anext(parts, None)


def _end_to_end(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers that are forwarded: none of one connection, nor those that `Connection` names."""
    named = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")}
    return [(key, value) for key, value in headers if key not in HOP_BY_HOP and key not in named]


def _late(why: object) -> ApiError:
    return ApiError(504, str(why), code="replica_timeout")
