"""Server-sent events: the framing, and the response that carries them."""

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
    # nginx and its kin hold streams back otherwise.
    (b"x-accel-buffering", b"no"),
)


def event(data: Mapping[str, Any]) -> bytes:
    """Return one event."""
    return "".join(framed(JsonWriter(ascii_only=True).parts(data))).encode()


def framed(parts: Iterable[str]) -> Iterator[str]:
    """Yield the text of one event.

    Args:
        parts: of its JSON, in which all but ASCII is escaped: some clients split lines at U+2028 and U+0085 too.
    """
    yield "data: "
    yield from parts
    yield "\n\n"


class EventStream:
    """A response that sends events as they come.

    Args:
        first: the events that are there already; that there are some decides the status 200.
        rest: what follows; it is closed whatever ends the response.
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
