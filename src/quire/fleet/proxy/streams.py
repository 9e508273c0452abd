"""Forwarded streams of events: whole events only, and an error in the protocol's form if a stream is cut off."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from quire.fleet.proxy.upstream import UpstreamDamaged
from quire.platform.bounded.json_text import BadJSON, parse
from quire.server.requests.errors import ApiError

EVENT_STREAM, JSON_LINES = b"text/event-stream", b"application/x-ndjson"
DONE = b"data: [DONE]\n\n"
# Routes whose requests have a prompt that may be cached, and whose streams have a last event.
PATHS: Final = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"),
        *("/api/chat", "/api/generate"),
    }
)
# Routes whose streams end with `DONE`, and the names of the last events of other routes' streams.
DONE_ROUTES: Final = ("/v1/completions", "/v1/chat/completions")
LAST_EVENTS: Final = frozenset(
    {*(b"message_stop", b"error"), *(b"response.%b" % end for end in (b"completed", b"incomplete", b"failed"))}
)
# Two ends of lines, each of which is LF, CR or both. A CR at the end of the data counts, though its LF may follow.
EVENT_END: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
LINE_END: Final = re.compile(rb"\r\n|\n|\r")
# Bytes of one event, which is stored until its end arrives; and of a line that may be the last of Ollama's streams.
MAX_EVENT_BYTES: Final = 16 << 20
MAX_LAST_LINE_BYTES: Final = 1 << 20


class EventCutter:
    """Forwards whole events, and stores the rest until the end of its event arrives."""

    def __init__(self, content_type: bytes) -> None:
        kind = content_type.lower()
        self._is_lines = kind.startswith(JSON_LINES)
        self.is_stream = self._is_lines or kind.startswith(EVENT_STREAM)
        self._rest = bytearray()
        self._passed = b""

    def add(self, data: bytes) -> bytes:
        """Add received bytes, and return the bytes that may be forwarded.

        Raises:
            UpstreamDamaged: the stored event is too long.
        """
        if not self.is_stream:
            return data
        # The first part of an end may have arrived before.
        since = max(0, len(self._rest) - 3)
        self._rest += data
        end = self._last_end(since)
        if len(self._rest) - end > MAX_EVENT_BYTES:
            raise UpstreamDamaged(f"an event of its stream has more than {MAX_EVENT_BYTES} bytes")
        if not end:
            return b""
        self._passed = bytes(memoryview(self._rest)[:end])
        del self._rest[:end]
        return self._passed

    def finish(self, path: str) -> bytes:
        """Return the rest at the end of a whole answer.

        Raises:
            UpstreamDamaged: the stream has ended without the last event of its route.
        """
        remainder, self._rest = bytes(self._rest), bytearray()
        self._passed = remainder or self._passed
        if self.is_stream and path in PATHS and not self.has_last_event(path):
            raise UpstreamDamaged("its stream has ended without its last event")
        return remainder

    def has_last_event(self, path: str) -> bool:
        """Return whether the last event of a route's stream was forwarded, so that the answer is complete."""
        if self._is_lines:
            return _is_last_line(self._passed.rstrip().rpartition(b"\n")[2])
        passed = LINE_END.sub(b"\n", self._passed)
        lines = passed.rstrip(b"\n").rpartition(b"\n\n")[2].split(b"\n") if passed.endswith(b"\n") else ()
        fields = {name: value.removeprefix(b" ") for name, _, value in (line.partition(b":") for line in lines)}
        if path in DONE_ROUTES:
            return fields.get(b"data") == b"[DONE]"
        return fields.get(b"event") in LAST_EVENTS

    def _last_end(self, since: int) -> int:
        """Return where the last whole event ends; 0 if none ends after `since`."""
        rest = self._rest
        if self._is_lines:
            return rest.rfind(b"\n", since) + 1
        if rest.find(b"\r", since) < 0:
            place = rest.rfind(b"\n\n", since)
            return 0 if place < 0 else place + 2
        return max((match.end() for match in EVENT_END.finditer(rest, since)), default=0)


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


def _is_last_line(line: bytes) -> bool:
    """Return whether a line is the last one of a stream of Ollama's."""
    fields = fields_of(line) if len(line) <= MAX_LAST_LINE_BYTES else {}
    return bool(fields.get("done")) or "error" in fields


def fields_of(body: bytes) -> Mapping[str, Any]:
    """Return the fields of a JSON object; none for anything else."""
    try:
        fields = parse(body)
    except BadJSON:
        return {}
    return fields if isinstance(fields, dict) else {}
