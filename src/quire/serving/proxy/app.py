"""The proxy's application: it passes every request on, to the server that the router chooses for its prompt.

```
 a prompt           the router's server; before the first byte, the next one where it fails
 all servers' state every server: adapters, pins, resets; the answer is the first one's, or that of one that failed
 all others         a server that takes requests
 /router/...        the proxy itself
```
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.routing.router import Route, RouteRequest
from quire.server.auth import check_operator
from quire.server.errors import SHOWN_ID, ApiError, unavailable
from quire.serving.proxy.fleet import Fleet
from quire.serving.proxy.metrics import ProxyMetrics
from quire.serving.proxy.prompts import PATHS, RoutedPrompts
from quire.serving.proxy.replica import Replica
from quire.serving.proxy.streams import EventCutter, error_event
from quire.serving.proxy.upstream import UpstreamLost, UpstreamResponse

logger = logging.getLogger(__name__)

# Routes that change what each server has.
BROADCAST: Final = frozenset(
    {
        *("/reset_prefix_cache", "/pin_prefix", "/unpin_prefix"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    }
)
# Headers of one connection, by RFC 9110, and those that each side writes itself.
HOP_BY_HOP: Final = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"host", b"content-length", b"expect", b"x-request-id", b"date", b"server"),
    }
)
SESSION_HEADER: Final = "x-session-id"
REPLICA_HEADER: Final = b"x-quire-replica"
# Statuses of a server that cannot take a request, where another one may.
BUSY: Final = (429, 503)
# Bodies of all requests together.
MAX_BODY_BYTES: Final = 1 << 30


class Proxy:
    """The ASGI application.

    Args:
        fleet: the servers.
        max_body_bytes: longest body of a request.
        tenant_header: header that names the tenant, as at the servers; None where all clients are one.
        has_operators: True where operators have a key.
    """

    def __init__(
        self, fleet: Fleet, max_body_bytes: int, tenant_header: str | None = None, *, has_operators: bool = False
    ) -> None:
        self._fleet = fleet
        self._max_body_bytes = max_body_bytes
        self._tenant_header = tenant_header
        self._has_operators = has_operators
        self._prompts = RoutedPrompts(fleet.ask_for_tokens)
        self.metrics = ProxyMetrics(fleet)
        self._num_body_bytes = 0
        self.num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        path: str = scope["path"]
        self.num_requests += 1
        try:
            if path in ("/health", "/ping", "/metrics") or path.startswith("/router/"):
                await (await self._own(scope, receive))(scope, receive, send)
                return
            body = await self._read_body(scope, receive)
            self._num_body_bytes += len(body)
            exchange = _Exchange(scope, body, receive, send)
            try:
                if path in BROADCAST and scope["method"] == "POST":
                    await self._broadcast(exchange)
                elif path in PATHS and scope["method"] == "POST":
                    await self._route(exchange)
                else:
                    await self._pass_on(exchange)
            finally:
                exchange.close()
                self._num_body_bytes -= len(body)
        finally:
            self.num_requests -= 1

    # ---- the proxy's own routes ----

    async def _own(self, scope: Scope, receive: Receive) -> Response:
        path, method, fleet = scope["path"], scope["method"], self._fleet
        if path in ("/health", "/ping"):
            count = len(fleet.available())
            status = "ok" if count else "no server takes requests"
            body = {"status": status, "num_replicas": len(fleet.replicas), "num_available": count}
            return _json(body, 200 if count else 503)
        check_operator(Request(scope), has_operators=self._has_operators)
        if path == "/metrics" and method == "GET":
            return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
        if path == "/router/replicas" and method == "GET":
            return _json({"replicas": [replica.describe() for replica in fleet.replicas.values()]})
        if path in ("/router/drain", "/router/undrain") and method == "POST":
            given = _parse(await self._read_body(scope, receive)).get("replica")
            replica = fleet.replicas.get(given) if isinstance(given, str) else None
            if replica is None:
                names = ", ".join(fleet.replicas)
                why = f"replica must be one of {names}, got {given!r:.100}"
                raise ApiError(400, why, code="invalid_value", param="replica")
            replica.is_draining = path == "/router/drain"
            replica.update()
            return _json(replica.describe())
        raise ApiError(404, f"there is no such route: {method} {path[:200]}", code="not_found")

    # ---- requests that are passed on ----

    async def _route(self, exchange: _Exchange) -> None:
        """Send a request where its prompt is cached, or where it begins first; elsewhere where that fails."""
        loop, fields = asyncio.get_running_loop(), _fields_of(exchange.body)
        started_s = loop.time()
        tenant = None if self._tenant_header is None else exchange.headers.get(self._tenant_header)
        prompt = await self._prompts.read(exchange.path, exchange.body, fields, tenant)
        session = exchange.headers.get(SESSION_HEADER) or fields.get("prompt_cache_key")
        request = RouteRequest(prompt.token_ids, prompt.scope, session if isinstance(session, str) else None)
        tried: list[str] = []
        while True:
            self._fleet.refresh()
            route = self._fleet.router.route(request, loop.time(), tried)
            if route is None:
                await exchange.give_up(bool(tried))
                return
            if not tried:
                self.metrics.choose_s.observe(loop.time() - started_s)
                self.metrics.prompt_tokens.inc(route.num_tokens)
                self.metrics.hit_tokens.inc(route.hit.num_tokens)
            try:
                if await self._attempt(exchange, self._fleet.replicas[route.replica], route):
                    return
            finally:
                self._fleet.router.end(route)
            tried.append(route.replica)
            self.metrics.retries.inc()

    async def _pass_on(self, exchange: _Exchange) -> None:
        """Send a request without a prompt that could be cached to a server with few requests, or the next one.

        What pages ask for goes to the first server: the parts of a page belong together.
        """
        replicas = self._fleet.available()
        if exchange.method == "GET":
            replicas = [replica for replica in self._fleet.replicas.values() if replica in replicas]
        for replica in replicas:
            if await self._attempt(exchange, replica):
                return
        await exchange.give_up(bool(replicas))

    async def _broadcast(self, exchange: _Exchange) -> None:
        """Send a request to every server that is up; answer with a failure where there is one."""
        replicas = [replica for replica in self._fleet.replicas.values() if replica.is_up]
        chosen: UpstreamResponse | None = None
        try:
            for replica in replicas:
                try:
                    response = await exchange.send_to(replica)
                except UpstreamLost as error:
                    replica.fail(str(error))
                    why = f"{replica.name} was lost, those before it have done it: {error}"
                    raise unavailable(why, "replica_lost") from error
                if chosen is None or (chosen.status < 400 <= response.status):
                    chosen, response = response, chosen
                if response is not None:
                    response.close()
            if chosen is None:
                await exchange.give_up(False)
            else:
                await exchange.relay(chosen, replicas[0].name)
        finally:
            if chosen is not None:
                chosen.close()

    async def _attempt(self, exchange: _Exchange, replica: Replica, route: Route | None = None) -> bool:
        """Have a server answer a request; return False where another one may still do so."""
        replica.num_in_flight += 1
        end = "left"
        try:
            end = await self._answer(exchange, replica, route)
        finally:
            replica.num_in_flight -= 1
            self.metrics.requests.labels(replica.name, end).inc()
        return end not in ("lost", "busy")

    async def _answer(self, exchange: _Exchange, replica: Replica, route: Route | None) -> str:
        """Return how a server's answer to a request ended."""
        response: UpstreamResponse | None = None
        try:
            response = await exchange.unless_left(exchange.send_to(replica))
            if response is None:
                return "left"
            if response.status in BUSY:
                exchange.last_busy = (response.status, response.header(b"retry-after"))
                return "busy"

            def on_first_part() -> None:
                # The answer in one piece comes with its last token.
                if route is not None and cutter.is_stream:
                    self._fleet.router.on_first_token(route, asyncio.get_running_loop().time())

            cutter = EventCutter(response.header(b"content-type"))
            is_whole = await exchange.relay(response, replica.name, cutter, on_first_part)
            replica.succeed()
            return "answered" if is_whole else "left"
        except UpstreamLost as error:
            replica.fail(str(error))
            if not exchange.has_begun:
                return "lost"
            logger.warning("request %s was lost with %s: %s", exchange.request_id, replica.name, error)
            await exchange.cut_off(f"the server of this request was lost: {error}")
            return "cut off"
        finally:
            if response is not None:
                response.close()

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body of a request.

        Raises:
            ApiError: 413, it is too long; 503, all bodies together are.
        """
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
        if self._num_body_bytes + num_bytes > MAX_BODY_BYTES:
            raise unavailable("too many long bodies are on their way", "too_many_uploads")
        return b"".join(parts)


class _Exchange:
    """One request of a client, and what was sent of its answer.

    Args:
        scope: ASGI's scope.
        body: body of the request, read to its end.
        receive: ASGI's function that tells when the client has left.
        send: ASGI's function that sends the answer.

    Attributes:
        has_begun: True once a part of the answer was sent.
        last_busy: status and Retry-After of the last server that was busy.
    """

    def __init__(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        self.path: str = scope["path"]
        self.headers = Headers(scope=scope)
        self.body = body
        self.request_id: str = scope.get(SHOWN_ID, "")
        self.has_begun = False
        self.last_busy: tuple[int, bytes] | None = None
        self.method: str = scope["method"]
        query = scope.get("query_string", b"")
        self._target = scope.get("raw_path", self.path.encode()) + (b"?" + query if query else b"")
        self._raw = scope["headers"]
        self._send = send
        self._is_stream = False
        self._receive = receive
        self._left: asyncio.Future[None] | None = None

    async def send_to(self, replica: Replica) -> UpstreamResponse:
        """Send the request to a server and return its answer, of which the head has arrived.

        Raises:
            UpstreamLost: there is none.
        """
        named = {name.strip().lower() for key, value in self._raw if key == b"connection" for name in value.split(b",")}
        headers = [(key, value) for key, value in self._raw if key not in HOP_BY_HOP and key not in named]
        headers.append((b"x-request-id", self.request_id.encode()))
        return await replica.upstream.request(self.method, self._target, headers, self.body)

    async def unless_left(self, work: Any) -> Any:
        """Return the result of a coroutine, None where the client leaves first."""
        if self._left is None:
            self._left = asyncio.ensure_future(self._wait_until_left())
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
        return await task if task.done() and not task.cancelled() else None

    async def relay(
        self,
        response: UpstreamResponse,
        replica: str,
        cutter: EventCutter | None = None,
        on_first_part: Any = None,
    ) -> bool:
        """Send a server's answer to the client; the head only with the first part of the body.

        Returns:
            False where the client has left.

        Raises:
            UpstreamLost: the answer is not whole.
        """
        cutter = cutter or EventCutter(response.header(b"content-type"))
        self._is_stream = cutter.is_stream
        parts = response.parts()
        while True:
            part = await self.unless_left(anext(parts, None))
            if part is None and self._left is not None and self._left.done():
                return False
            data = cutter.finish() if part is None else cutter.add(part)
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
        """End an answer that has begun: a stream with an error, another one by closing the connection.

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
            ApiError: 429 or 503 with Retry-After.
        """
        if self.last_busy is not None:
            status, retry_after = self.last_busy
            raise ApiError(
                status,
                "all servers are busy",
                code="queue_full" if status == 429 else "busy",
                headers={"Retry-After": retry_after.decode("latin-1") or "1"},
            )
        why = "every server that could take this request was lost" if was_tried else "no server takes requests"
        raise unavailable(why, "no_replica")

    async def _begin(self, response: UpstreamResponse, replica: str) -> None:
        length = [(b"content-length", response.header(b"content-length"))] if response.header(b"content-length") else []
        headers = [(key, value) for key, value in response.headers if key not in HOP_BY_HOP]
        headers += [*length, (REPLICA_HEADER, replica.encode())]
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


def _fields_of(body: bytes) -> Mapping[str, Any]:
    """Return the fields of a body; none where it is no JSON object, which a server then refuses."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _parse(body: bytes) -> Mapping[str, Any]:
    fields = _fields_of(body)
    if not fields:
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return fields


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(body).encode(), status_code=status, media_type="application/json")
