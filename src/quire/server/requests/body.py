"""Strict parsing of JSON request bodies within limits."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request

from quire.platform.bounded.json_text import FEW_BYTES, MAX_PROCESSES, BadJSON, JSONReader, may_have_many_values, parse
from quire.platform.threads import WorkerThreads
from quire.server.requests.errors import OLLAMA_PATH, ApiError, unavailable

# Number of bodies of maximum length that may be arriving at a time, and that may wait to be parsed: of `SHORT_BYTES` or
# less, and of more.
MAX_LONG_BODIES = 32
MAX_LONGER_BODIES = 8
SHORT_BYTES = 8 << 20


def max_waiting_bytes(max_bytes: int) -> int:
    """Return the maximum total length of bodies of at most `max_bytes` that are arriving, or wait to be parsed."""
    return max(MAX_LONG_BODIES * min(max_bytes, SHORT_BYTES), MAX_LONGER_BODIES * max_bytes)


class BodyReader:
    """Reads bodies; long ones are parsed in threads and processes."""

    def __init__(self, max_bytes: int, max_integers: int) -> None:
        self.max_bytes = max_bytes
        self._reader = JSONReader(max_bytes, max_integers)
        self._threads = WorkerThreads(1, "quire-bodies")
        # These threads only wait for the processes that parse.
        self._waiting = WorkerThreads(MAX_PROCESSES, "quire-large-bodies")
        # Total length of the long bodies that wait to be parsed or are being parsed.
        self._num_bytes = 0

    async def read_object(self, request: Request) -> dict[str, Any]:
        """Read a body as one JSON object."""
        check_json(request)
        return await self.parse_object(await self.read(request))

    async def read(self, request: Request) -> bytes:
        """Read a body of any content type."""
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self.max_bytes:
            raise _too_long(self.max_bytes)
        parts: list[bytes] = []
        length = 0
        async for part in request.stream():
            length += len(part)
            if length > self.max_bytes:
                raise _too_long(self.max_bytes)
            parts.append(part)
        return b"".join(parts)

    async def parse_object(self, raw: bytes) -> dict[str, Any]:
        """Parse a body."""
        try:
            body = parse(raw) if len(raw) <= FEW_BYTES else await self._parse_apart(raw)
        except BadJSON as error:
            raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
        if not isinstance(body, dict):
            raise ApiError(400, f"the body must be a JSON object, not {_kind(body)}", code="invalid_json")
        return body

    async def _parse_apart(self, raw: bytes) -> Any:
        if self._num_bytes + len(raw) > max_waiting_bytes(self.max_bytes):
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
        """Return the memory of a large body to the system, with a short delay."""
        self._threads.give_back_soon()

    def close(self) -> None:
        """End the processes and threads."""
        self._threads.close()
        self._waiting.close()
        self._reader.close()


def check_json(request: Request) -> None:
    """Check that the content type of a request is JSON; Ollama's routes need it of web pages only."""
    # Pages of other sites can send plain text to a server on this machine, but not this content type.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Ollama reads a body of any type, so its clients send none, and the examples of its documentation curl's default.
    may_differ = request.scope["path"].startswith(OLLAMA_PATH) and not is_from_page(request)
    if content_type != "application/json" and not may_differ:
        raise ApiError(
            415,
            f"the content type must be application/json, got {content_type[:100] or 'none'}",
            code="unsupported_media_type",
        )


def is_from_page(request: Request) -> bool:
    """Return whether a web page may have sent a request: browsers then send its origin, or its relation to the site."""
    headers = request.headers
    return "origin" in headers or headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


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
