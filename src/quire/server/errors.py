"""Every error as OpenAI's clients expect it: `{"error": {"message", "type", "param", "code"}}`, whatever the status."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import QueueFull, QuireError, RequestError

logger = logging.getLogger(__name__)

# Where the guard leaves a request's id in the ASGI scope.
REQUEST_ID = "quire.request_id"
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


def stopping() -> ApiError:
    """Return the answer to what comes, or is not done, once the server was asked to stop."""
    return unavailable("the server is stopping", "stopping")


def api_error(error: Exception, request_id: str) -> ApiError:
    """Translate any exception; what is not meant for clients goes to the log, under the request's id."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code=error.code, headers={"Retry-After": str(error.retry_after_s)})
    if isinstance(error, RequestError):
        return ApiError(400, str(error), code=error.code, param=error.field)
    if isinstance(error, HTTPException):
        return _from_http_exception(error)
    if isinstance(error, QuireError):
        logger.error("the engine failed on request %s: %s", request_id, error, exc_info=error)
        return unavailable(f"the engine failed; the log has the reason for request {request_id}", "engine_error")
    logger.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, f"the server failed; its log has the reason for request {request_id}", code="internal_error")


async def handle_error(request: Request, error: Exception) -> Response:
    """Answer a request whose handler raised."""
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        where = f"{request.method} {request.url.path[:200]}"
        words = "there is no such route" if error.status_code == 404 else "the route has no such method"
        code = HTTPStatus(error.status_code).name.lower()
        return ApiError(error.status_code, f"{words}: {where}", code=code, headers=error.headers).response()
    return api_error(error, request.scope[REQUEST_ID]).response()


def _from_http_exception(error: HTTPException) -> ApiError:
    code = HTTPStatus(error.status_code).name.lower()
    return ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)
