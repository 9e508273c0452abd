"""Streams that are passed on: whole events, and errors in each protocol's form."""

from __future__ import annotations

import json
import random

import pytest

from quire.fleet.proxy import streams
from quire.fleet.proxy.streams import EventCutter, error_event
from quire.fleet.proxy.upstream import UpstreamDamaged
from quire.server.requests.errors import ApiError

EVENTS = b'data: {"a": 1}\n\n: ping\n\ndata: {"b": "x\\n"}\n\ndata: [DONE]\n\n'


ENDS = {"LF": b"\n", "CRLF": b"\r\n", "CR": b"\r"}


@pytest.mark.parametrize("line_end", ENDS.values(), ids=ENDS.keys())
def test_only_whole_events_are_passed_on_however_they_arrive(line_end: bytes) -> None:
    events = EVENTS.replace(b"\n", line_end)
    rng = random.Random(1)
    for _ in range(200):
        cutter, sent, start = EventCutter(b"text/event-stream; charset=utf-8"), b"", 0
        while start < len(events):
            end = start + rng.randrange(1, 20)
            part = cutter.add(events[start:end])
            # The LF of the last CRLF may come later.
            assert part == b"" or part.endswith((line_end * 2, b"\r\n\r"))
            sent += part
            start = end
            assert events[: len(sent)] == sent
        assert sent + cutter.finish("") == events


@pytest.mark.parametrize("line_end", ENDS.values(), ids=ENDS.keys())
def test_an_event_is_passed_on_with_the_byte_that_ends_it(line_end: bytes) -> None:
    cutter = EventCutter(b"text/event-stream")
    for event in EVENTS.replace(b"\n", line_end).split(line_end * 2)[:-1]:
        whole = event + line_end * 2
        passed = [cutter.add(whole[place : place + 1]) for place in range(len(whole))]
        assert b"".join(passed[: len(event) + 1]).lstrip(b"\n") == b""
        assert cutter.add(b"").lstrip(b"\n") == b""
        # Of CRLF the CR ends the line already.
        assert b"".join(passed).strip(line_end) == event


def test_a_single_end_of_a_line_is_not_the_end_of_an_event() -> None:
    for line_end in ENDS.values():
        cutter = EventCutter(b"text/event-stream")
        assert [cutter.add(b"data: a" + line_end), cutter.add(b"data: b" + line_end)] == [b"", b""]
        assert cutter.add(line_end).startswith(b"data: a")


@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/x-ndjson"])
def test_an_event_is_bounded_and_many_are_not(monkeypatch: pytest.MonkeyPatch, kind: bytes) -> None:
    monkeypatch.setattr(streams, "MAX_EVENT_BYTES", 1000)
    cutter = EventCutter(kind)
    assert len(cutter.add(b"data: x\n\n" * 1000)) == 9000
    assert cutter.add(b"y" * 1000) == b""
    with pytest.raises(UpstreamDamaged, match="an event of its stream has more than 1000 bytes"):
        cutter.add(b"y")


def test_what_is_no_stream_is_passed_on_as_it_is() -> None:
    cutter = EventCutter(b"application/json")
    assert [cutter.add(b'{"a"'), cutter.add(b": 1}"), cutter.finish("/v1/completions")] == [b'{"a"', b": 1}", b""]
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


@pytest.mark.parametrize("line_end", ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize(("path", "last"), LAST)
def test_the_end_of_a_stream_is_checked(path: str, last: bytes, line_end: bytes) -> None:
    is_lines = path.startswith("/api/")
    line_end = line_end if not is_lines else b"\n"
    kind = b"Application/X-NDJSON" if is_lines else b"TEXT/event-stream"
    further = b'{"done": false}\n' if is_lines else b"data: {}\n\n: ping\n\n"
    for text in (last, further + last, (further + last)[:-1]):
        cutter, converted = EventCutter(kind), text.replace(b"\n", line_end)
        assert cutter.add(converted) + cutter.finish(path) == converted
    for text in (further, last + further, further + last[:-5], b""):
        cutter = EventCutter(kind)
        cutter.add(text.replace(b"\n", line_end))
        with pytest.raises(UpstreamDamaged, match="ended without its last event"):
            cutter.finish(path)


@pytest.mark.parametrize("line", [b"\n", b"[" * 100_000 + b"\n", b"done\n", b"[1]\n", b"null\n"])
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
