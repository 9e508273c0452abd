"""Streams that are passed on: whole events, and errors in each protocol's form."""

from __future__ import annotations

import json
import random

import pytest

from quire.fleet.proxy.streams import EventCutter, error_event
from quire.server.requests.errors import ApiError

EVENTS = b'data: {"a": 1}\n\n: ping\n\ndata: {"b": "x\\n"}\n\ndata: [DONE]\n\n'


def test_only_whole_events_are_passed_on_however_they_arrive() -> None:
    rng = random.Random(1)
    for _ in range(200):
        cutter, sent, start = EventCutter(b"text/event-stream; charset=utf-8"), b"", 0
        while start < len(EVENTS):
            end = start + rng.randrange(1, 20)
            part = cutter.add(EVENTS[start:end])
            assert part == b"" or part.endswith(b"\n\n")
            sent += part
            start = end
            assert EVENTS[: len(sent)] == sent
        assert sent + cutter.finish() == EVENTS


def test_what_is_no_stream_is_passed_on_as_it_is() -> None:
    cutter = EventCutter(b"application/json")
    assert [cutter.add(b'{"a"'), cutter.add(b": 1}"), cutter.finish()] == [b'{"a"', b": 1}", b""]
    assert not cutter.is_stream


LAST = [
    ("/v1/completions", b"data: [DONE]\n\n"),
    ("/v1/chat/completions", b"data: [DONE]\n\n"),
    ("/v1/messages", b'event: message_stop\ndata: {"type": "message_stop"}\n\n'),
    ("/v1/responses", b'event: response.completed\ndata: {"type": "response.completed"}\n\n'),
    ("/v1/responses", b'event: response.incomplete\ndata: {"type": "response.incomplete"}\n\n'),
    ("/api/chat", b'{"message": {"content": "[DONE]"}, "done": true}\n'),
    ("/api/generate", b'{"response": "", "done": true}\n'),
]


@pytest.mark.parametrize(("path", "last"), LAST)
def test_the_last_event_of_a_stream_is_known(path: str, last: bytes) -> None:
    is_lines = path.startswith("/api/")
    further = b'{"response": "\\"done\\": true", "done": false}\n' if is_lines else b'data: {"a": "[DONE]"}\n\n'
    for split in (1, len(further), len(further) + len(last)):
        cutter = EventCutter(b"application/x-ndjson" if is_lines else b"text/event-stream")
        assert not cutter.has_last_event(path)
        text = further + last
        cutter.add(text[:split])
        assert cutter.has_last_event(path) == (split == len(text))
        cutter.add(text[split:-1])
        cutter.add(text[max(split, len(text) - 1) :])
        assert cutter.has_last_event(path)


@pytest.mark.parametrize("line", [b"\n", b"done\n", b"[1]\n", b"null\n"])
def test_a_line_that_is_no_object_is_not_the_last(line: bytes) -> None:
    cutter = EventCutter(b"application/x-ndjson")
    cutter.add(line)
    assert not cutter.has_last_event("/api/chat")


@pytest.mark.parametrize("path", sorted({path for path, _ in LAST}))
def test_an_error_is_the_last_event_of_a_stream(path: str) -> None:
    cutter = EventCutter(b"application/x-ndjson" if path.startswith("/api/") else b"text/event-stream")
    cutter.add(error_event(path, ApiError(503, "why", code="lost")))
    assert cutter.has_last_event(path)


@pytest.mark.parametrize(
    ("path", "start", "end"),
    [
        ("/v1/completions", b'data: {"error": ', b"data: [DONE]\n\n"),
        ("/v1/chat/completions", b'data: {"error": ', b"data: [DONE]\n\n"),
        ("/v1/messages", b'event: error\ndata: {"type": "error", ', b"}\n\n"),
        ("/v1/responses", b'event: error\ndata: {"type": "error", "code": "lost"', b"}\n\n"),
        ("/api/chat", b'{"error": "why"}', b"\n"),
    ],
)
def test_an_error_has_the_form_of_its_protocol(path: str, start: bytes, end: bytes) -> None:
    event = error_event(path, ApiError(503, "why", code="lost"))
    assert event.startswith(start)
    assert event.endswith(end)
    for line in event.replace(b"data: [DONE]", b"").splitlines():
        if line.startswith((b"data: ", b"{")):
            assert "why" in json.dumps(json.loads(line.removeprefix(b"data: ")))
