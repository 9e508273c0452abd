"""Requests with tools, and readers of their answers, for the tests of tools."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from quire.text.tool_calls import FORMATS
from tests.server.process import ServerProcess

CHAT = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Looks.", "parameters": CITY},
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
USER = [{"role": "user", "content": "hi"}]
ASK: dict[str, Any] = {"messages": USER, "tools": [WEATHER, NOW], "temperature": 0, "max_tokens": 200}
PARIS = '{"city": "Paris"}'
CALLS = [("get_weather", PARIS)]
ALL_CALLS = {form: [*CALLS, ("now", "{}")] if form == "llama3" else CALLS for form in FORMATS}
HAS_GRAMMARS = importlib.util.find_spec("llguidance") is not None
needs_grammars = pytest.mark.skipif(not HAS_GRAMMARS, reason="calls are required through llguidance")

Serve = Callable[[str], ServerProcess]


def ask(server: ServerProcess, **more: Any) -> dict[str, Any]:
    """Return the one choice of an answer."""
    response = server.post(CHAT, {**ASK, **more})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


def names_and_arguments(calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    assert all(call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """Return a sample's calls as a client puts them together."""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            for part in choice["delta"].get("tool_calls", ()):
                if part["index"] == len(calls):
                    assert set(part) == {"index", "id", "type", "function"}
                    calls.append({**part, "function": dict(part["function"])})
                else:
                    assert set(part) == {"index", "function"}
                    assert set(part["function"]) == {"arguments"}
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return calls


def reasons(chunks: list[dict[str, Any]]) -> list[str]:
    found = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    return [reason for reason in found if reason is not None]
