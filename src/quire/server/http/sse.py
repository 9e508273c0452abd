"""Streams of JSON objects: server-sent events, JSON lines, and their response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from quire.server.http.direct_events import DirectEvents
from quire.server.http.json_stream import JsonWriter
from quire.server.http.transport import BODY_WRITER

DONE = b"data: [DONE]\n\n"
PING = ": ping\n\n"
EVENTS = "text/event-stream; charset=utf-8"
# Key of the ASGI scope with the server's own `send`, for bodies, which no middleware changes.
DIRECT_SEND = "quire.direct_send"


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """The form of a protocol's streams.

    Args:
        media_type: content type of the response.
        is_named: True if each event has a name, the `type` of its object.
        is_bare: True if each object is a line without a frame.
        ping: text that keeps a silent connection open; empty if the protocol has none.
        end: text at the end of every stream.
    """

    media_type: str = EVENTS
    is_named: bool = False
    is_bare: bool = False
    ping: str = PING
    end: bytes = b""

    def framed(self, chunk: Mapping[str, Any], writer: JsonWriter) -> Iterator[str]:
        """Yield the text of one object in parts."""
        if self.is_named:
            yield f"event: {chunk['type']}\n"
        if not self.is_bare:
            yield "data: "
        yield from writer.parts(chunk)
        yield "\n" if self.is_bare else "\n\n"

    def one(self, chunk: Mapping[str, Any]) -> bytes:
        """Return the text of one short object."""
        return "".join(self.framed(chunk, JsonWriter(ascii_only=True))).encode()


OPENAI_EVENTS = StreamFormat(end=DONE)
NAMED_EVENTS = StreamFormat(is_named=True)
JSON_LINES = StreamFormat(media_type="application/x-ndjson", is_bare=True, ping="")


class EventStream:
    """A response that sends events as they are made."""

    def __init__(
        self,
        first: bytes,
        pieces: AsyncGenerator[bytes, None],
        media_type: str = EVENTS,
        direct: DirectEvents | None = None,
    ) -> None:
        self._first = first
        self._pieces = pieces
        self._direct = direct
        self._headers = [
            (b"content-type", media_type.encode()),
            (b"cache-control", b"no-cache"),
            # nginx and similar proxies buffer streams otherwise.
            (b"x-accel-buffering", b"no"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        """Send the response."""
        async with aclosing(self._pieces) as pieces:
            send_body: Send = scope.get(DIRECT_SEND, send)
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await send_body({"type": "http.response.body", "body": self._first, "more_body": True})
            if self._direct is not None and DIRECT_SEND in scope:
                self._direct.writer = scope.get(BODY_WRITER)
            async for events in pieces:
                await send_body({"type": "http.response.body", "body": events, "more_body": True})
            await send_body({"type": "http.response.body", "body": b"", "more_body": False})
