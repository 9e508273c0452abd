"""The deployment of the ingress: the whole HTTP interface; each request is sent to a replica that the router chooses.

```
 client -> Serve's proxy -> Ingress: key, body, tokens of the prompt -> handle, CacheAwareRouter -> ServedReplica
 a prompt           the router's replica; if it fails or is busy before the first byte, another one
 all replicas' state every replica: adapters, pins, resets; the answer is the first error, or else the first answer
 all others         one replica
 /metrics           metrics of all replicas, with the label replica, and of all routers, with the label ingress
```
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from ray import serve
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.fleet.proxy.exchange import MAX_INTEGERS, Exchange, Exchanges, ReadAnswer
from quire.fleet.proxy.metrics import ProxyMetrics
from quire.fleet.proxy.prompts import RoutedPrompts
from quire.fleet.proxy.shared_state import NAME_OF
from quire.fleet.proxy.streams import PATHS
from quire.fleet.proxy.upstream import UpstreamLost
from quire.fleet.ray.call import RawHeaders, RoutedCall, Ticket, WholeAnswer
from quire.fleet.ray.fleet import FLEETS, ReplicaFleet
from quire.fleet.ray.handle_calls import HandleCall, lost_by
from quire.fleet.ray.metrics import INGRESS, merge_metrics
from quire.fleet.routing.router import RouteRequest
from quire.server.requests.body import BodyReader
from quire.server.requests.errors import check_route, unavailable
from quire.server.settings import ServerConfig
from quire.server.state.auth import check_operator, guarded
from quire.server.state.intake import Intake

# Attempts to have one request answered.
MAX_ATTEMPTS: Final = 8
ASK_S: Final = 2.0
START_S: Final = 5.0
BROADCAST_S: Final = 120.0
# The ingress's own routes and their methods.
OWN_ROUTES: Final[Mapping[str, tuple[str, ...]]] = {
    "/health": ("GET", "HEAD"),
    "/ping": ("GET", "HEAD"),
    "/metrics": ("GET",),
    "/router/replicas": ("GET",),
}


class IngressReplica:
    """One replica of the ingress. Serve runs the application that it builds."""

    def __init__(self, engine: Any, server_options: dict[str, Any]) -> None:
        self._engine = engine
        self._config = ServerConfig(**server_options)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application, after checks of keys and origins."""
        config = self._config
        self._ingress = Ingress(self._engine, config, serve.get_replica_context())
        intake = Intake(self._ingress, bodies=self._ingress.bodies, admit=lambda _: None)
        return _without_request_id(guarded(intake, config))

    async def router_metrics(self) -> tuple[str, bytes]:
        """Return the name of this replica, and the metrics of its router, for another replica."""
        return await self._ingress.router_metrics()


class Ingress:
    """The ASGI application."""

    def __init__(self, engine: Any, config: ServerConfig, context: Any) -> None:
        self._engine = engine
        self._streams = engine.options(stream=True)
        self._app_name = str(context.app_name)
        self._name = str(context.replica_id.unique_id)
        self._ingresses = serve.get_deployment_handle(context.deployment, context.app_name)
        self._has_operators = config.operator_key is not None
        key = config.operator_key or config.api_key
        self._headers: RawHeaders = () if key is None else ((b"authorization", f"Bearer {key}".encode()),)
        self.bodies = BodyReader(config.body_limit(reads_images=True), MAX_INTEGERS)
        self._exchanges = Exchanges(self.bodies)
        self._prompts = RoutedPrompts(self._ask_for_tokens, self.bodies, config.tenant_header)
        self._states: dict[str, dict[str, Any]] = {}
        self._metrics = ProxyMetrics(lambda: self._states)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        # Serve states the application's route prefix as ASGI does, in `root_path`.
        root = scope.get("root_path", "").rstrip("/")
        path = scope["path"].removeprefix(root) or "/"
        scope = {**scope, "path": path, "raw_path": scope.get("raw_path", path.encode()).removeprefix(root.encode())}
        if path in OWN_ROUTES or path.startswith("/router/"):
            await (await self._own(scope))(scope, receive, send)
            return
        async with self._exchanges.open(scope, receive, send) as exchange:
            if path in NAME_OF and scope["method"] == "POST":
                await self._broadcast(exchange)
            elif path in PATHS and scope["method"] == "POST":
                await self._send(exchange, await self._prompts.request_of(exchange))
            else:
                await self._send(exchange, None)

    # ---- the ingress's own routes ----

    @property
    def _fleet(self) -> ReplicaFleet | None:
        """The fleet of the handle's router; None before its first request."""
        return FLEETS.get(self._app_name)

    async def _own(self, scope: Scope) -> Response:
        path, fleet = scope["path"], self._fleet
        check_route(OWN_ROUTES, scope["method"], path)
        if path in ("/health", "/ping"):
            # Serve starts the ingress after replicas are ready, and the router learns of them with the first request.
            count = len(fleet.names) if fleet is not None else None
            status = "no replica takes requests" if count == 0 else "ok"
            return _json({"status": status, "num_replicas": count}, 503 if count == 0 else 200)
        check_operator(Request(scope), has_operators=self._has_operators)
        if path == "/metrics":
            text = merge_metrics(await self._ask_all("metrics")) + await self._all_router_metrics()
            return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
        states = {} if fleet is None else await fleet.describe_soon()
        return _json({"replicas": list(states.values())})

    async def router_metrics(self) -> tuple[str, bytes]:
        """Return the name of this replica, and the metrics of its router in Prometheus' text format."""
        self._states = {} if self._fleet is None else await self._fleet.describe_soon()
        return self._name, self._metrics.render()

    async def _all_router_metrics(self) -> bytes:
        """Return the metrics of the routers of all ingresses, since any ingress may get the request for them."""
        texts = [await self.router_metrics()]
        with suppress(UpstreamLost):
            answers = await self._ask_all("router_metrics", timeout_s=ASK_S, handle=self._ingresses)
            texts += [answer for answer in answers if not isinstance(answer, BaseException) and answer[0] != self._name]
        return merge_metrics(texts, INGRESS)

    # ---- forwarded requests ----

    async def _send(self, exchange: Exchange, request: RouteRequest | None) -> None:
        """Have a replica answer a request; if it fails before the first byte, another one."""
        tried: list[str] = []
        started_s = time.monotonic()
        for _ in range(MAX_ATTEMPTS):
            # GET requests go to the same replica, because the parts of a page belong together.
            ticket = Ticket(request, tuple(tried), is_pinned=request is None and exchange.method == "GET")
            end = "left"
            try:
                end = await self._attempt(exchange, ticket)
            finally:
                ticket.end()
                self._count(ticket, end, started_s, is_first=not tried)
            if end not in ("lost", "damaged", "refused", "busy"):
                return
            if ticket.replica is None:
                break
            tried.append(ticket.replica)
            names = self._fleet.names if self._fleet is not None else []
            if end == "busy" and not set(names) - set(tried):
                break
            self._metrics.retries.labels(end).inc()
        await exchange.give_up(bool(tried))

    async def _attempt(self, exchange: Exchange, ticket: Ticket) -> str:
        """Make an attempt, and return how it ended; see `Exchange.attempt`."""
        upstream = HandleCall(self._streams, ticket)

        def on_begin(is_stream: bool) -> None:
            if is_stream:  # an answer in one piece arrives with its last token
                ticket.begin_stream()

        return await exchange.attempt(upstream, lambda: ticket.replica or "", on_begin, lambda _: None)

    def _count(self, ticket: Ticket, end: str, started_s: float, *, is_first: bool) -> None:
        self._metrics.requests.labels(ticket.replica or "none", end).inc()
        if is_first and ticket.request is not None and ticket.routed_s:
            self._metrics.choose_s.observe(max(0.0, ticket.routed_s - started_s))
            self._metrics.prompt_tokens.inc(len(ticket.request.token_ids))
            self._metrics.hit_tokens.inc(ticket.num_hit)

    async def _broadcast(self, exchange: Exchange) -> None:
        """Send a request to every replica; answer with the first error, or else the first answer."""
        requester = _Broadcast(self._ask_all)
        try:
            answer = await exchange.send_to(requester)
        except UpstreamLost as error:
            raise unavailable(f"a replica was lost, others have done it: {error}", "replica_lost") from error
        await exchange.relay(answer, requester.replica)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Answer ASGI's lifespan. At the start, the handle gets to know the replicas, and its router their caches."""
        while True:
            kind = (await receive())["type"]
            if kind == "lifespan.startup":
                with suppress(UpstreamLost):  # the engine may start later
                    await self._ask_all("check_health", timeout_s=START_S)
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return

    async def _ask_for_tokens(self, body: bytes, _model: str | None) -> bytes | None:
        """Return a replica's answer to `POST /prompt_tokens`; None if there is no answer in time."""
        ticket = Ticket()
        headers = (*self._headers, (b"content-type", b"application/json"))
        try:
            async with asyncio.timeout(ASK_S):
                answer = await HandleCall(self._streams, ticket).request("POST", b"/prompt_tokens", headers, body)
                try:
                    parts = [part async for part in answer.parts()]
                finally:
                    answer.close()
        except (UpstreamLost, TimeoutError):
            return None
        finally:
            ticket.end()
        return b"".join(parts) if answer.status == 200 else None

    async def _ask_all(self, method: str, *args: Any, timeout_s: float = BROADCAST_S, handle: Any = None) -> list[Any]:
        """Return the results of a method of every replica, with exceptions of replicas that fail."""
        try:
            response = (handle or self._engine).broadcast(method, *args)
            async with asyncio.timeout(timeout_s):
                return list(await response.results_async(return_exceptions=True))
        except Exception as error:
            raise UpstreamLost(lost_by(error)) from error


class _Broadcast:
    """Sends one request to every replica."""

    def __init__(self, ask_all: Callable[..., Awaitable[list[Any]]]) -> None:
        self._ask_all = ask_all
        self.replica = ""

    async def request(self, method: str, target: bytes, headers: Any, body: bytes) -> ReadAnswer:
        """Return the first answer with an error status, or else the first answer."""
        replies = await self._ask_all("answer_whole", RoutedCall(method, target, tuple(headers), body))
        lost = [reply for reply in replies if isinstance(reply, BaseException)]
        if lost or not replies:
            raise UpstreamLost(lost_by(lost[0]) if lost else "there is no replica")
        answers: list[WholeAnswer] = replies
        chosen = next((answer for answer in answers if answer.head.status >= 400), answers[0])
        self.replica = chosen.head.replica
        return ReadAnswer(chosen.head.status, list(chosen.head.headers), chosen.body)


def _without_request_id(app: ASGIApp) -> ASGIApp:
    """Return an application without the header `x-request-id` in its answers, because Serve's proxy adds it."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_rest(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [header for header in message["headers"] if header[0].lower() != b"x-request-id"]
            await send(message)

        await app(scope, receive, send_rest)

    return call


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(body).encode(), status_code=status, media_type="application/json")
