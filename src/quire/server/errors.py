"""Every error as OpenAI's clients expect it: `{"error": {"message", "type", "param", "code"}}`, whatever the status."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from quire.errors import QueueFull, QuireError, RequestError

logger = logging.getLogger(__name__)

# Where the guard leaves a request's id in the ASGI scope.
REQUEST_ID = "quire.request_id"
# nginx's status for a client that left; nobody reads it.
CLIENT_GONE = 499
# And whether it came with the operator's key.
IS_OPERATOR = "quire.is_operator"
# What ends a task rather than a request.
ENDINGS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer with an error status.

    Args:
        status: the HTTP status.
        message: what was wrong and what would have been right; shown to the client.
        code: a short machine-readable reason.
        param: the request's field to blame, or None.
        headers: of the answer.
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
        """Return the error as the client reads it."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the answer."""
        return Response(
            json.dumps(self.body()).encode(),
            status_code=self.status,
            headers=self.headers,
            media_type="application/json",
        )


def unavailable(why: str, code: str) -> ApiError:
    """Return the 503 that tells a client to try again, here or at another server."""
    return ApiError(503, why, code=code, headers={"Retry-After": "1"})


def no_room() -> ApiError:
    """Return the answer to a connection for which there is no place, or whose place another one gets."""
    return unavailable("the server has no room for another connection", "too_many_connections")


def stopping() -> ApiError:
    """Return the answer to what comes, or is not done, once the server was asked to stop."""
    return unavailable("the server is stopping", "stopping")


def api_error(error: BaseException, request_id: str) -> ApiError:
    """Translate any exception; what is not meant for clients goes to the log, under the request's id."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code=error.code, headers={"Retry-After": str(error.retry_after_s)})
    if isinstance(error, RequestError):
        return ApiError(400, str(error), code=error.code, param=error.field)
    if isinstance(error, QuireError):
        logger.error("the engine failed on request %s: %s", request_id, error, exc_info=error)
        return unavailable(f"the engine failed; the log has the reason for request {request_id}", "engine_error")
    logger.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, f"the server failed; its log has the reason for request {request_id}", code="internal_error")


def error_response(error: BaseException, request_id: str) -> Response:
    """Return the answer to a request whose handler raised."""
    if isinstance(error, ClientDisconnect):
        logger.debug("the client of request %s left while it was sending", request_id)
        return Response(status_code=CLIENT_GONE)
    return api_error(error, request_id).response()


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """Answer what Starlette refuses: an unknown route or method."""
    assert isinstance(error, HTTPException)
    words = {404: "there is no such route", 405: "the route has no such method"}.get(error.status_code)
    message = str(error.detail) if words is None else f"{words}: {request.method} {request.scope['path'][:200]}"
    code = HTTPStatus(error.status_code).name.lower()
    return ApiError(error.status_code, message, code=code, headers=error.headers).response()
