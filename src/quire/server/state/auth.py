"""Authentication: every request gets an id, and needs the key if the server has one."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import random
import re
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server.requests.errors import IS_OPERATOR, REQUEST_ID, SHOWN_ID, TASK_ENDING_ERRORS, ApiError, error_response
from quire.server.settings import ServerConfig

# The page is the same for all clients, and prompts for the key itself.
OPEN_PATH = re.compile(r"/health|/ping|/|/page/.*")
# A request id of the client: visible characters, so that it can stand in a header and a line of a log.
CLIENT_ID = re.compile(r"[!-~]{1,128}")
# A name or an address, or an IPv6 address in brackets; with an optional port.
HOST = re.compile(r"(?:\[(?P<address>[^\[\]]*:[^\[\]]*)\]|(?P<name>[^\[\]:]*))(?::[0-9]*)?")


class Guard:
    """ASGI middleware that authenticates every request of the application.

    Args:
        app: application after the guard.
        api_key: key of the clients, as a bearer token, in the header `x-api-key` (Anthropic's clients), or as the
            password of basic authentication (which a browser can send for the page). None admits every request whose
            host is a local name or an address.
        operator_key: key of the operators; None if clients may use the routes of operation.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, operator_key: str | None = None) -> None:
        self._app = app
        # A UUID would be read from the kernel, which lets the engine's thread have the interpreter's lock meanwhile.
        self._random = random.Random()
        self._api_key = None if api_key is None else api_key.encode()
        self._operator_key = None if operator_key is None else operator_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope[REQUEST_ID] = f"{self._random.getrandbits(128):032x}"
        # Several requests of a client may have one id, so the answer's id is the server's own.
        client_id = headers.get("x-request-id", "")
        request_id = scope[SHOWN_ID] = client_id if CLIENT_ID.fullmatch(client_id) else scope[REQUEST_ID]
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            presented = _presented_keys(headers)
            scope[IS_OPERATOR] = self._operator_key is not None and _has_key(presented, self._operator_key)
            is_open = scope[IS_OPERATOR] or OPEN_PATH.fullmatch(scope["path"]) is not None
            refusal = None if is_open else self._refusal(headers, presented)
            handler = self._app if refusal is None else refusal.response(scope["path"])
            await handler(scope, receive, send_with_id)
        except TASK_ENDING_ERRORS:
            raise
        except BaseException as error:  # a panic of a Rust library is not an Exception
            # An answer that has begun stays incomplete, which ends the connection.
            answer = error_response(error, request_id, scope["path"])
            if not has_begun:
                await answer(scope, receive, send_with_id)

    def _refusal(self, headers: Headers, presented: Sequence[bytes]) -> ApiError | None:
        if self._api_key is None:
            host = headers.get("host", "")
            if is_local_host(host):
                return None
            # DNS rebinding: a page of another site whose name resolves to this machine would count as the server's.
            why = f"without an API key the host must be localhost or an address, got {host[:100]!r}"
            return ApiError(403, why, code="host_not_allowed")
        return None if _has_key(presented, self._api_key) else invalid_key("API")


def guarded(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """Return an application behind the guard, which pages of the allowed origins may call.

    Args:
        app: application after the guard.
        config: keys and origins.
    """
    guard = Guard(app, api_key=config.api_key, operator_key=config.operator_key)
    if not config.allow_origins:
        return guard
    # Preflight requests have no key, so CORS precedes the guard.
    return CORSMiddleware(
        guard,
        allow_origins=config.allow_origins,
        allow_methods=("GET", "POST"),
        # Some clients send many headers of their own; none of them can do harm without a key.
        allow_headers=("*",),
        expose_headers=("retry-after", "x-request-id", "x-quire-replica"),
    )


def check_operator(request: Request, *, has_operators: bool) -> None:
    """Check that a request to a route of operation may be answered.

    Args:
        request: request that the guard has admitted.
        has_operators: True if operators have a key; without one, clients may use these routes.

    Raises:
        ApiError: 401, the request has no key; 403, it has a client's.
    """
    if request.scope[IS_OPERATOR] or not has_operators:
        return
    if not (request.headers.get("authorization") or request.headers.get("x-api-key")):
        raise invalid_key("operator's")
    raise ApiError(403, "this route needs the operator's key", code="operator_only")


def invalid_key(whose: str) -> ApiError:
    """Return the refusal of a request without a key or with a wrong one; a browser then prompts for the key."""
    return ApiError(
        401,
        f"the {whose} key is missing or wrong; send it as Authorization: Bearer KEY, or as x-api-key",
        code="invalid_api_key",
        headers={"WWW-Authenticate": 'Basic realm="quire", charset="UTF-8"'},
    )


def is_local_host(host: str) -> bool:
    """Return whether a Host header names this machine by localhost or an address, which no other site can claim."""
    match = HOST.fullmatch(host)
    if match is None:
        return False
    name = (match["name"] or "").lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(match["address"] or match["name"])
    except ValueError:
        return False
    return True


def _has_key(presented: Sequence[bytes], key: bytes) -> bool:
    return any(hmac.compare_digest(one, key) for one in presented)


def _presented_keys(headers: Headers) -> tuple[bytes, bytes]:
    return _presented_key(headers.get("authorization", "")), headers.get("x-api-key", "").encode("latin-1")


def _presented_key(authorization: str) -> bytes:
    scheme, _, value = authorization.partition(" ")
    value = value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.encode("latin-1"), validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return value.encode("latin-1") if scheme.lower() == "bearer" else b""
