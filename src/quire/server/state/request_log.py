"""The record of each HTTP request: a counter by route and status, a line in the log, and a span."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.admission.in_flight import InFlightRequest
from quire.server.http.sse import DIRECT_SEND
from quire.server.log_setup import FIELDS
from quire.server.requests.errors import CLIENT_GONE, IN_FLIGHT, SHOWN_ID
from quire.server.state.state import ServerState
from quire.server.state.tracing import RequestTracer

if TYPE_CHECKING:
    from quire.engine.inputs.prompts import TokenPrompt

logger = logging.getLogger(__name__)

METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS"})
# Routes that are asked again and again by programs; their successful answers are left out of the log.
PROBES = frozenset({"/health", "/ping", "/metrics"})
# Label of unknown paths and methods, which clients can choose freely.
OTHER = "other"


class RequestRecorder:
    """ASGI middleware around all others, which records each request after its answer."""

    def __init__(self, app: ASGIApp, *, state: ServerState, tracer: RequestTracer | None, paths: Iterable[str]) -> None:
        self._app = app
        self._state = state
        self._tracer = tracer
        self._paths = frozenset(paths)
        self._open_paths = [(path.partition("{")[0], path) for path in self._paths if "{" in path]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and record it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s = time.monotonic()
        status = CLIENT_GONE

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope[DIRECT_SEND] = send
        try:
            await self._app(scope, receive, send_noted)
        finally:
            self._record(scope, status, begun_s)

    def _record(self, scope: Scope, status: int, begun_s: float) -> None:
        route, method = self._route(scope["path"]), scope["method"]
        method = method if method in METHODS else OTHER
        self._state.llm.metrics.on_http_request(route, method, status)
        tracked: InFlightRequest | None = scope.get(IN_FLIGHT)
        if self._state.config.log_requests and not (route in PROBES and status < 400):
            fields = {
                "id": scope.get(SHOWN_ID),
                "method": method,
                "route": route,
                "status": status,
                "ms": round(1e3 * (time.monotonic() - begun_s), 1),
                **({} if tracked is None else request_fields(tracked)),
            }
            text = " ".join(f"{name}={_shown(value)}" for name, value in fields.items() if value is not None)
            logger.info("Request: %s", text, extra={FIELDS: fields})
        if self._tracer is not None and tracked is not None:
            self._tracer.record(
                tracked,
                scope["headers"],
                model_name=self._state.llm.model_name,
                request_id=scope.get(SHOWN_ID, ""),
                status=status,
            )

    def _route(self, path: str) -> str:
        """Return the path of a request's route."""
        if path in self._paths:
            return path
        return next((route for start, route in self._open_paths if path.startswith(start)), OTHER)


def request_fields(tracked: InFlightRequest) -> dict[str, Any]:
    """Return the fields of a generating request in the log; a request that its client left has no finish reason."""
    count = tracked.count
    return {
        "answer": tracked.answer_id,
        "prompt_tokens": count.num_prompt,
        "cached_tokens": count.num_cached,
        "completion_tokens": count.num_output,
        "finish_reason": ",".join(count.finish_reasons) or "none",
        "prompt": tracked.shown_prompt,
    }


def shown_prompt(prompts: Iterable[TokenPrompt], limit: int) -> str | None:
    """Return the beginning of a request's prompts for the log, at most `limit` characters; None for a limit of 0."""
    if not limit:
        return None
    texts = (str(list(prompt.token_ids)) if prompt.text is None else prompt.text for prompt in prompts)
    return " ".join(text[:limit] for text in texts)[:limit]


def _shown(value: object) -> str:
    """Return a value for a line of text; texts of clients are quoted, so that they stay in the line."""
    text = str(value)
    return text if text.isascii() and text.isprintable() and not {" ", '"', "="} & {*text} else json.dumps(text)
