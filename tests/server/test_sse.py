"""Framing of server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from quire.server.http import sse

# Line ends of one client library or another.
SEPARATORS = "a\nb\r\nc\rd\u2028e\u2029f\x85g\x0bh\x0ci"


def test_an_event_is_one_line_for_every_kind_of_line_end() -> None:
    framed = sse.OPENAI_EVENTS.one({"text": SEPARATORS}).decode()
    assert framed.splitlines() == [framed.removesuffix("\n\n"), ""]
    assert json.loads(framed.removeprefix("data: ")) == {"text": SEPARATORS}


def test_numbers_that_json_lacks_are_never_sent() -> None:
    with pytest.raises(ValueError, match="JSON"):
        sse.OPENAI_EVENTS.one({"logprob": float("-inf")})


def test_a_response_sends_each_piece_at_once_and_ends() -> None:
    async def rest() -> AsyncGenerator[bytes, None]:
        yield b"data: 2\n\n"
        yield sse.DONE

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("a stream's response does not read")

    asyncio.run(sse.EventStream(b"data: 1\n\n", rest())({"type": "http"}, receive, send))
    assert dict(sent[0]["headers"])[b"x-accel-buffering"] == b"no"
    assert [message.get("body") for message in sent[1:]] == [b"data: 1\n\n", b"data: 2\n\n", sse.DONE, b""]
    assert [message.get("more_body") for message in sent[1:]] == [True, True, True, False]


def test_the_source_is_closed_when_sending_fails() -> None:
    closed = []

    async def rest() -> AsyncGenerator[bytes, None]:
        try:
            yield b"data: 2\n\n"
        finally:
            closed.append(True)

    async def send(message: Any) -> None:
        if message.get("body") == b"data: 2\n\n":
            raise OSError("gone")

    async def receive() -> Any:
        raise AssertionError

    with pytest.raises(OSError, match="gone"):
        asyncio.run(sse.EventStream(b"data: 1\n\n", rest())({"type": "http"}, receive, send))
    assert closed
