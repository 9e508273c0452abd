"""Earlier tool calls in the form that a chat template reads, or in the content if it reads no calls."""

from __future__ import annotations

import json
from typing import Any

from quire.text.chat.written_calls import writes_no_calls, written_calls


class Arguments(dict[str, Any]):
    """The arguments of a call: an object, or its JSON if a template uses it as a text, as DeepSeek's templates do."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, after: str) -> str:
        return str(self) + after

    def __radd__(self, before: str) -> str:
        return before + str(self)


def put_calls_in_form(messages: list[dict[str, Any]], source: str) -> None:
    """Convert the calls of messages in place; for a template that writes no calls, move them into the content."""
    is_written = writes_no_calls(source)
    for message in messages:
        calls = message.get("tool_calls", [])
        if calls and is_written:
            text, content = written_calls(message.pop("tool_calls")), message["content"]
            message["content"] = text + content if isinstance(content, str) else [_part(text), *content]
        for call in calls:
            call["function"]["arguments"] = Arguments(call["function"]["arguments"])


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
