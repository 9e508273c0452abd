"""Errors at every status, in the form of the route's protocol; OpenAI's is
`{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match

from quire.errors import QueueFull, QuireError, RankFailed, RequestError, UnknownAdapter

logger = logging.getLogger(__name__)

# Key of the ASGI scope of a generating request, with its `InFlightRequest`.
IN_FLIGHT = "quire.in_flight"
# Keys of the ASGI scope that the guard sets: the request's id; the id in its answer's header and in logs, which may be
# the client's; and whether the request has the operator's key.
REQUEST_ID = "quire.request_id"
SHOWN_ID = "quire.shown_id"
IS_OPERATOR = "quire.is_operator"
# nginx's status for a client that has left; it is never read.
CLIENT_GONE = 499
# Exceptions that end a task, not a request.
TASK_ENDING_ERRORS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
# Anthropic's types that differ from OpenAI's.
ANTHROPIC_TYPES = {404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
_REFUSALS = {404: "there is no such route", 405: "the route has no such method"}
ANTHROPIC_PATH, OLLAMA_PATH = "/v1/messages", "/api/"


class ApiError(Exception):
    """An answer with an error status.

    Args:
        status: the HTTP status.
        message: the fault and the allowed values, for the client.
        code: machine-readable reason.
        param: field of the request with the fault, or None.
        headers: headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """Return the error in Anthropic's form."""
        kind = ANTHROPIC_TYPES.get(self.status) or TYPES.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(self)}}

    def ollama_body(self) -> dict[str, Any]:
        """Return the error in Ollama's form."""
        return {"error": str(self)}

    def body_for(self, path: str) -> dict[str, Any]:
        """Return the error in the form of a route's protocol."""
        if path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/"):
            return self.anthropic_body()
        return self.ollama_body() if path.startswith(OLLAMA_PATH) else self.body()

    def response(self, path: str = "") -> Response:
        """Return the answer.

        Args:
            path: path of the request, whose protocol determines the error's form.
        """
        return Response(
            json.dumps(self.body_for(path)).encode(),
            status_code=self.status,
            headers=self.headers,
            media_type="application/json",
        )


def unavailable(why: str, code: str) -> ApiError:
    """Return a 503 with `Retry-After`; the client may also retry at another server."""
    return ApiError(503, why, code=code, headers={"Retry-After": "1"})


def too_many_connections() -> ApiError:
    """Return the answer to a connection that exceeds the limit, or is closed in favour of another one."""
    return unavailable("the server has no room for another connection", "too_many_connections")


def stopping() -> ApiError:
    """Return the answer to requests that are new or unfinished while the server stops."""
    return unavailable("the server is stopping", "stopping")


def api_error(error: BaseException, request_id: str) -> ApiError:
    """Convert an exception to an answer; details of internal errors go to the log, with the request's id."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code=error.code, headers={"Retry-After": str(error.retry_after_s)})
    if isinstance(error, UnknownAdapter):
        return ApiError(404, str(error), code=error.code, param=error.field)
    if isinstance(error, RequestError):
        return ApiError(400, str(error), code=error.code, param=error.field)
    if isinstance(error, QuireError):
        logger.error("the engine failed on request %s: %s", request_id, error, exc_info=error)
        reason = f" ({error})" if isinstance(error, RankFailed) else ""
        return unavailable(
            f"the engine failed{reason}; the log has the reason for request {request_id}", "engine_error"
        )
    logger.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, f"the server failed; its log has the reason for request {request_id}", code="internal_error")


def error_response(error: BaseException, request_id: str, path: str) -> Response:
    """Return the answer to a request for a path whose handler raised."""
    if isinstance(error, ClientDisconnect):
        logger.debug("the client of request %s left while it was sending", request_id)
        return Response(status_code=CLIENT_GONE)
    return api_error(error, request_id).response(path)


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """Return the answer to an unknown route or method, which Starlette refuses."""
    assert isinstance(error, HTTPException)
    status, method, path = error.status_code, request.method, request.scope["path"]
    message = _refusal(status, method, path) if status in _REFUSALS else str(error.detail)
    if status == 404:
        message += _hint(request)
    if method == "OPTIONS" and "origin" in request.headers:
        message += "; pages of other origins need --allow-origin"
    return ApiError(status, message, code=HTTPStatus(status).name.lower(), headers=error.headers).response(path)


def check_route(routes: Mapping[str, Sequence[str]], method: str, path: str) -> None:
    """Check a request for routes that Starlette does not know.

    Args:
        routes: the methods of each path.
        method, path: those of the request.

    Raises:
        ApiError: 404 or 405, as `handle_http_exception` gives them.
    """
    allowed = routes.get(path)
    if allowed is None:
        raise ApiError(404, _refusal(404, method, path), code="not_found")
    if method not in allowed:
        names = ", ".join(allowed)
        why = f"{_refusal(405, method, path)}; it has {names}"
        raise ApiError(405, why, code="method_not_allowed", headers={"allow": names})


def _refusal(status: int, method: str, path: str) -> str:
    return f"{_REFUSALS[status]}: {method} {path[:200]}"


def _hint(request: Request) -> str:
    """Return a question for a path that only lacks `/v1`, or has it or a slash too much; base URLs differ in these."""
    path = request.scope["path"]
    for meant in (f"/v1{path}", path.removeprefix("/v1"), path.rstrip("/")):
        scope = {**request.scope, "path": meant}
        if meant != path and any(route.matches(scope)[0] is not Match.NONE for route in request.app.router.routes):
            return f"; did you mean {meant[:200]}?"
    return ""
