"""Reads a request's JSON body: bounded, strict, and refused in words."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request

from quire.bounded.json_text import FEW_BYTES, MAX_PROCESSES, BadJSON, JSONReader, may_have_many_values, parse
from quire.platform.threads import WorkerThreads
from quire.server.errors import ApiError, unavailable

# Bodies of the longest kind that may be on their way at a time, and so many that may wait to be parsed.
MAX_LONG_BODIES = 32


class Bodies:
    """Reads bodies; what would take long to parse is parsed elsewhere.

    Args:
        max_bytes: of the longest body.
        max_integers: of the longest list of integers in one.
    """

    def __init__(self, max_bytes: int, max_integers: int) -> None:
        self.max_bytes = max_bytes
        self._reader = JSONReader(max_bytes, max_integers)
        self._threads = WorkerThreads(1, "quire-bodies")
        # These only wait for the processes that parse.
        self._waiting = WorkerThreads(MAX_PROCESSES, "quire-large-bodies")
        # Of bodies that wait to be parsed, or are.
        self._num_bytes = 0

    async def read_object(self, request: Request) -> dict[str, Any]:
        """Read a body as one JSON object.

        Args:
            request: its body was not read before.

        Raises:
            ApiError: 415 not sent as JSON, 413 too long, 400 not a JSON object in UTF-8, or one out of bounds.
        """
        check_json(request)
        return await self.parse_object(await _read(request, self.max_bytes))

    async def parse_object(self, raw: bytes) -> dict[str, Any]:
        """Parse a body.

        Raises:
            ApiError: 400 with the reason; 503, too many long ones wait to be parsed.
        """
        try:
            body = parse(raw) if len(raw) <= FEW_BYTES else await self._parse_apart(raw)
        except BadJSON as error:
            raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
        if not isinstance(body, dict):
            raise ApiError(400, f"the body must be a JSON object, not {_kind(body)}", code="invalid_json")
        return body

    async def _parse_apart(self, raw: bytes) -> Any:
        if self._num_bytes + len(raw) > MAX_LONG_BODIES * self.max_bytes:
            raise unavailable("too many long bodies wait to be read", "too_many_uploads")
        self._num_bytes += len(raw)
        try:
            if not may_have_many_values(raw):
                return await self._threads.run(partial(parse, raw))
            self._waiting.give_back_soon()
            return await self._waiting.run(partial(self._reader.parse, raw))
        finally:
            self._num_bytes -= len(raw)

    def give_back_soon(self) -> None:
        """Give what a large body took back to the system, a little later."""
        self._threads.give_back_soon()

    def close(self) -> None:
        """End the processes and threads."""
        self._threads.close()
        self._waiting.close()
        self._reader.close()


def check_json(request: Request) -> None:
    """Check that a request says that its body is JSON.

    Raises:
        ApiError: 415, it does not.
    """
    # Pages of other sites can send plain text to a server on this machine, but not this type.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(
            415,
            f"the content type must be application/json, got {content_type[:100] or 'none'}",
            code="unsupported_media_type",
        )


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_long(max_bytes)
    parts: list[bytes] = []
    length = 0
    async for part in request.stream():
        length += len(part)
        if length > max_bytes:
            raise _too_long(max_bytes)
        parts.append(part)
    return b"".join(parts)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "a number"


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is longer than {max_bytes} bytes", code="content_too_large")
