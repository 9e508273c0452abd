"""The proxy's application: its own routes (`/router/...`, `/health`, `/metrics`); it forwards all other requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.fleet.proxy.exchange import BodyBudget
from quire.fleet.proxy.fleet import Fleet
from quire.fleet.proxy.forwarding import Forwarder
from quire.fleet.proxy.metrics import ProxyMetrics
from quire.fleet.proxy.prompts import RoutedPrompts
from quire.fleet.proxy.streams import fields_of
from quire.server.requests.errors import ApiError
from quire.server.state.auth import check_operator


class Proxy:
    """The ASGI application."""

    def __init__(
        self, fleet: Fleet, max_body_bytes: int, tenant_header: str | None = None, *, has_operators: bool = False
    ) -> None:
        self._fleet = fleet
        self._bodies = BodyBudget(max_body_bytes)
        self._has_operators = has_operators
        self.metrics = ProxyMetrics(
            lambda: {state["url"]: state for state in fleet.describe()},
            lambda: self._forwarder.describe(),
        )
        prompts = RoutedPrompts(fleet.ask_for_tokens, tenant_header)
        self._forwarder = Forwarder(fleet, prompts, self.metrics)
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
                await self._forwarder.forward(exchange)
        finally:
            self.num_requests -= 1

    # ---- the proxy's own routes ----

    async def _own(self, scope: Scope, receive: Receive) -> Response:
        path, method, fleet = scope["path"], scope["method"], self._fleet
        if path in ("/health", "/ping"):
            count = len(fleet.available())
            status = "ok" if count else "no server takes requests"
            body = {"status": status, "num_replicas": len(fleet.replicas), "num_available": count, **fleet.health()}
            return _json(body, 200 if count else 503)
        check_operator(Request(scope), has_operators=self._has_operators)
        if path == "/metrics" and method == "GET":
            return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
        if path == "/router/replicas" and method == "GET":
            return _json({"replicas": fleet.describe(), **self._forwarder.describe()})
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


def _parse(body: bytes) -> Mapping[str, Any]:
    fields = fields_of(body)
    if not fields:
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return fields


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(body).encode(), status_code=status, media_type="application/json")
