"""Streams of events that are passed on: whole events only, and an error in the protocol's form where one is cut off."""

from __future__ import annotations

import json

from quire.server.errors import ApiError

EVENT_STREAM, JSON_LINES = b"text/event-stream", b"application/x-ndjson"
DONE = b"data: [DONE]\n\n"


class EventCutter:
    """Passes on what ends with a whole event, and keeps the rest until its end comes.

    Args:
        content_type: content type of the answer.
    """

    def __init__(self, content_type: bytes) -> None:
        self.is_stream = content_type.startswith((EVENT_STREAM, JSON_LINES))
        self._end = b"\n" if content_type.startswith(JSON_LINES) else b"\n\n"
        self._rest = b""

    def add(self, data: bytes) -> bytes:
        """Return what may be passed on after some more bytes."""
        if not self.is_stream:
            return data
        data = self._rest + data
        end = data.rfind(self._end) + len(self._end) if self._end in data else 0
        self._rest = data[end:]
        return data[:end]

    def finish(self) -> bytes:
        """Return what is left at the end of a whole answer."""
        rest, self._rest = self._rest, b""
        return rest


def error_event(path: str, error: ApiError) -> bytes:
    """Return the event that ends a route's stream with an error, as the server itself would."""
    if path == "/v1/responses":
        body = {"type": "error", "code": error.code, "message": str(error), "param": error.param}
        return b"event: error\ndata: %b\n\n" % json.dumps(body).encode()
    body = error.body_for(path)
    data = json.dumps(body).encode()
    if path.startswith("/api/"):
        return data + b"\n"
    if path == "/v1/messages":
        return b"event: error\ndata: %b\n\n" % data
    return b"data: %b\n\n" % data + (DONE if path in ("/v1/completions", "/v1/chat/completions") else b"")
