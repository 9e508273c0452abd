"""The proxy's application: its own routes (`/router/...`, `/health`, `/metrics`); it forwards all other requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.fleet.proxy.exchange import Exchanges
from quire.fleet.proxy.fleet import Fleet
from quire.fleet.proxy.forwarding import Forwarder
from quire.fleet.proxy.metrics import ProxyMetrics
from quire.fleet.proxy.prompts import RoutedPrompts
from quire.server.requests.body import BodyReader
from quire.server.requests.errors import ApiError, check_route, stopping
from quire.server.state.auth import check_operator

# The proxy's own routes and their methods.
OWN_ROUTES: Final[Mapping[str, tuple[str, ...]]] = {
    "/health": ("GET", "HEAD"),
    "/ping": ("GET", "HEAD"),
    "/metrics": ("GET",),
    "/router/replicas": ("GET",),
    "/router/drain": ("POST",),
    "/router/undrain": ("POST",),
}


class Proxy:
    """The ASGI application."""

    def __init__(
        self, fleet: Fleet, bodies: BodyReader, tenant_header: str | None = None, *, has_operators: bool = False
    ) -> None:
        self._fleet = fleet
        self._bodies = bodies
        self.exchanges = Exchanges(bodies)
        self.is_draining = False
        self._has_operators = has_operators
        self.metrics = ProxyMetrics(
            lambda: {state["url"]: state for state in fleet.describe()},
            lambda: self._forwarder.describe(),
        )
        prompts = RoutedPrompts(fleet.ask_for_tokens, bodies, tenant_header)
        self._forwarder = Forwarder(fleet, prompts, self.metrics)

    def admit(self, scope: Scope) -> None:
        """Refuse a request that would be forwarded while the proxy stops.

        Raises:
            ApiError: 503.
        """
        if self.is_draining and not _is_own(scope["path"]):
            raise stopping()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if _is_own(scope["path"]):
            await (await self._own(Request(scope, receive)))(scope, receive, send)
            return
        if scope["method"] == "CONNECT":
            # A success would be an answer without a body, after which the connection carries other bytes.
            raise ApiError(405, "no route has the method CONNECT: a router opens no tunnels", code="method_not_allowed")
        async with self.exchanges.open(scope, receive, send) as exchange:
            await self._forwarder.forward(exchange)

    # ---- the proxy's own routes ----

    async def _own(self, request: Request) -> Response:
        path, fleet = request.scope["path"], self._fleet
        check_route(OWN_ROUTES, request.method, path)
        if path in ("/health", "/ping"):
            count = len(fleet.available())
            status = "stopping" if self.is_draining else "ok" if count else "no server takes requests"
            body = {"status": status, "num_replicas": len(fleet.replicas), "num_available": count, **fleet.health()}
            return _json(body, 200 if status == "ok" else 503)
        check_operator(request, has_operators=self._has_operators)
        if path == "/metrics":
            return Response(self.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
        if path == "/router/replicas":
            return _json({"replicas": fleet.describe(), **self._forwarder.describe()})
        name = (await self._bodies.read_object(request)).get("replica")
        replica = fleet.replicas.get(name) if isinstance(name, str) else None
        if replica is None:
            why = f"replica must be one of {', '.join(fleet.replicas)}, got {name!r:.100}"
            raise ApiError(400, why, code="invalid_value", param="replica")
        replica.is_draining = path == "/router/drain"
        replica.update()
        return _json(replica.describe())


def _is_own(path: str) -> bool:
    """Return whether the proxy answers requests for a path itself."""
    return path in OWN_ROUTES or path.startswith("/router/")


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(body).encode(), status_code=status, media_type="application/json")
