"""Forwarded streams of events: whole events only, and an error in the protocol's form if a stream is cut off."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.server.requests.errors import ApiError

EVENT_STREAM, JSON_LINES = b"text/event-stream", b"application/x-ndjson"
DONE = b"data: [DONE]\n\n"
# Routes whose streams end with `DONE`, and the last events of other routes' streams.
DONE_ROUTES = ("/v1/completions", "/v1/chat/completions")
LAST_EVENTS = (
    *(b"event: message_stop\n", b"event: error\n"),
    *(b"event: response.%b\n" % status for status in (b"completed", b"incomplete", b"failed")),
)


class EventCutter:
    """Forwards whole events, and stores the rest until the end of its event arrives."""

    def __init__(self, content_type: bytes) -> None:
        self.is_stream = content_type.startswith((EVENT_STREAM, JSON_LINES))
        self._end = b"\n" if content_type.startswith(JSON_LINES) else b"\n\n"
        self._rest = b""
        self._passed = b""

    def add(self, data: bytes) -> bytes:
        """Add received bytes, and return the bytes that may be forwarded."""
        if not self.is_stream:
            return data
        data = self._rest + data
        end = data.rfind(self._end) + len(self._end) if self._end in data else 0
        self._rest = data[end:]
        if end:
            self._passed = data[:end]
        return data[:end]

    def finish(self) -> bytes:
        """Return the rest at the end of a whole answer."""
        remainder, self._rest = self._rest, b""
        return remainder

    def has_last_event(self, path: str) -> bool:
        """Return whether the last event of a route's stream was forwarded, so that the answer is complete."""
        last = self._passed.removesuffix(self._end).rpartition(self._end)[2] + self._end
        if path in DONE_ROUTES:
            return last == DONE
        if path.startswith("/api/"):
            line = fields_of(last)
            return bool(line.get("done")) or "error" in line
        return last.startswith(LAST_EVENTS)


def error_event(path: str, error: ApiError) -> bytes:
    """Return the event that ends a route's stream with an error, as the server would send it."""
    if path == "/v1/responses":
        body = {"type": "error", "code": error.code, "message": str(error), "param": error.param}
        return b"event: error\ndata: %b\n\n" % json.dumps(body).encode()
    body = error.body_for(path)
    data = json.dumps(body).encode()
    if path.startswith("/api/"):
        return data + b"\n"
    if path == "/v1/messages":
        return b"event: error\ndata: %b\n\n" % data
    return b"data: %b\n\n" % data + (DONE if path in DONE_ROUTES else b"")


def fields_of(body: bytes) -> Mapping[str, Any]:
    """Return the fields of a JSON object; none for anything else."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
