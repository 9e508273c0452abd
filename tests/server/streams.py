"""Reads server-sent events as they are on the wire."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.server.process import ServerProcess


def events_of(raw: str) -> list[str]:
    """Return the data of each event, `[DONE]` included; comments are left out."""
    assert raw.endswith("\n\n")
    blocks = raw.removesuffix("\n\n").split("\n\n")
    assert all("\n" not in block for block in blocks), "an event is one line"
    return [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]


def named_events(server: ServerProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of a whole stream whose events are named by the type of their object."""
    response = server.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, _, data = block.partition("\ndata: ")
        events.append(json.loads(data))
        assert name == f"event: {events[-1]['type']}"
    return events


def stream(server: ServerProcess, path: str, body: dict[str, Any]) -> tuple[httpx.Response, list[dict[str, Any]]]:
    """Return the response and the chunks of a whole stream; `[DONE]` ends it, once."""
    response = server.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    *chunks, done = events_of(response.text)
    assert done == "[DONE]"
    return response, [json.loads(chunk) for chunk in chunks]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """Return the text of one choice of a stream."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
