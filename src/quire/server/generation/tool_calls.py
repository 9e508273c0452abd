"""The tool calls of an answer in OpenAI's form."""

from __future__ import annotations

from typing import Any

from quire.text.tool_calls import CallDelta, SampleCalls, ToolCall


def call_deltas(calls: SampleCalls, text: str, *, is_finished: bool) -> list[dict[str, Any]]:
    """Return the stream deltas for a sample's new text."""
    deltas: list[dict[str, Any]] = []
    for piece in calls.pieces(text, is_finished=is_finished):
        if isinstance(piece, str):
            deltas.append({"content": piece})
        elif piece.name is not None or piece.arguments:
            deltas.append({"tool_calls": [{"index": piece.index, **_part(calls, piece)}]})
    return deltas


def call_message(calls: SampleCalls, text: str) -> dict[str, Any]:
    """Return the fields of a whole message."""
    content, tool_calls = calls.whole(text)
    if not tool_calls:
        return {"content": content}
    return {"content": content or None, "tool_calls": [call.as_message() for call in tool_calls]}


def _part(calls: SampleCalls, piece: CallDelta) -> dict[str, Any]:
    if piece.name is None:
        return {"function": {"arguments": piece.arguments}}
    return ToolCall(calls.new_id(piece.name, piece.index), piece.name, piece.arguments).as_message()
