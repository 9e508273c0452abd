"""The proxy's application: it forwards every request, if it has a prompt to the server that the router chooses.

```
 a prompt           the router's server; if it fails before the first byte, the next one
 all servers' state every server: adapters, pins, resets; the answer is the first error, or else the first answer
 all others         a server that takes requests
 /router/...        the proxy itself
```
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.fleet.proxy.exchange import Answer, BodyBudget, Exchange
from quire.fleet.proxy.fleet import Fleet
from quire.fleet.proxy.metrics import ProxyMetrics
from quire.fleet.proxy.prompts import PATHS, RoutedPrompts
from quire.fleet.proxy.replica import Replica
from quire.fleet.proxy.streams import fields_of
from quire.fleet.proxy.upstream import UpstreamLost
from quire.fleet.routing.router import Route
from quire.server.requests.errors import ApiError, unavailable
from quire.server.state.auth import check_operator

# Routes that change the state of every server.
BROADCAST: Final = frozenset(
    {
        *("/reset_prefix_cache", "/pin_prefix", "/unpin_prefix"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    }
)


class Proxy:
    """The ASGI application."""

    def __init__(
        self, fleet: Fleet, max_body_bytes: int, tenant_header: str | None = None, *, has_operators: bool = False
    ) -> None:
        self._fleet = fleet
        self._bodies = BodyBudget(max_body_bytes)
        self._has_operators = has_operators
        self._prompts = RoutedPrompts(fleet.ask_for_tokens, tenant_header)
        self.metrics = ProxyMetrics(lambda: {name: replica.describe() for name, replica in fleet.replicas.items()})
        self.num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        path: str = scope["path"]
        self.num_requests += 1
        try:
            if path in ("/health", "/ping", "/metrics") or path.startswith("/router/"):
                await (await self._own(scope, receive))(scope, receive, send)
                return
            async with self._bodies.open(scope, receive, send) as exchange:
                if path in BROADCAST and scope["method"] == "POST":
                    await self._broadcast(exchange)
                elif path in PATHS and scope["method"] == "POST":
                    await self._route(exchange)
                else:
                    await self._pass_on(exchange)
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
            name = _parse(await self._bodies.read(scope, receive)).get("replica")
            replica = fleet.replicas.get(name) if isinstance(name, str) else None
            if replica is None:
                names = ", ".join(fleet.replicas)
                why = f"replica must be one of {names}, got {name!r:.100}"
                raise ApiError(400, why, code="invalid_value", param="replica")
            replica.is_draining = path == "/router/drain"
            replica.update()
            return _json(replica.describe())
        raise ApiError(404, f"there is no such route: {method} {path[:200]}", code="not_found")

    # ---- forwarded requests ----

    async def _route(self, exchange: Exchange) -> None:
        """Send a request to the best server in the router's order; if it fails, to the next."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        request = await self._prompts.request_of(exchange)
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

    async def _pass_on(self, exchange: Exchange) -> None:
        """Send a request without a cacheable prompt to the server with the fewest requests; if it fails, to the next.

        GET requests go to the first server, because the parts of a page belong together.
        """
        replicas = self._fleet.available()
        if exchange.method == "GET":
            replicas = [replica for replica in self._fleet.replicas.values() if replica in replicas]
        for replica in replicas:
            if await self._attempt(exchange, replica):
                return
        await exchange.give_up(bool(replicas))

    async def _broadcast(self, exchange: Exchange) -> None:
        """Send a request to every server that is up; answer with the first error, or else the first answer."""
        replicas = [replica for replica in self._fleet.replicas.values() if replica.is_up]
        chosen: Answer | None = None
        name = ""  # of the server whose answer is chosen
        try:
            for replica in replicas:
                try:
                    response = await exchange.send_to(replica.upstream)
                except UpstreamLost as error:
                    replica.fail(str(error))
                    why = f"{replica.name} was lost, those before it have done it: {error}"
                    raise unavailable(why, "replica_lost") from error
                if chosen is None or (chosen.status < 400 <= response.status):
                    chosen, response, name = response, chosen, replica.name
                if response is not None:
                    response.close()
            if chosen is None:
                await exchange.give_up(False)
            else:
                await exchange.relay(chosen, name)
        finally:
            if chosen is not None:
                chosen.close()

    async def _attempt(self, exchange: Exchange, replica: Replica, route: Route | None = None) -> bool:
        """Have a server answer a request; return False if another server may still answer it."""

        def on_stream() -> None:
            if route is not None:
                self._fleet.router.on_first_token(route, asyncio.get_running_loop().time())

        replica.num_in_flight += 1
        end = "left"
        try:
            end = await exchange.attempt(
                replica.upstream, lambda: replica.name, on_stream, lambda error: replica.fail(str(error))
            )
            if end == "answered":
                replica.succeed()
        finally:
            replica.num_in_flight -= 1
            self.metrics.requests.labels(replica.name, end).inc()
        return end not in ("lost", "busy")


def _parse(body: bytes) -> Mapping[str, Any]:
    fields = fields_of(body)
    if not fields:
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return fields


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(body).encode(), status_code=status, media_type="application/json")
