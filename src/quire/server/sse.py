"""Server-sent events: their framing and their response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.types import Receive, Scope, Send

from quire.server.json_stream import JsonWriter

DONE = b"data: [DONE]\n\n"
PING = ": ping\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx and similar proxies buffer streams otherwise.
    (b"x-accel-buffering", b"no"),
)


def event(data: Mapping[str, Any]) -> bytes:
    """Return one event."""
    return "".join(framed(JsonWriter(ascii_only=True).parts(data))).encode()


def framed(parts: Iterable[str]) -> Iterator[str]:
    """Yield the text of one event.

    Args:
        parts: parts of its JSON, which is ASCII only: some clients split lines at U+2028 and U+0085 too.
    """
    yield "data: "
    yield from parts
    yield "\n\n"


class EventStream:
    """A response that sends events as they come.

    Args:
        first: first events; their existence determines the status 200.
        rest: further events; the generator is closed however the response ends.
    """

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        """Send the response."""
        async with aclosing(self._rest) as rest:
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for events in rest:
                await send({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
