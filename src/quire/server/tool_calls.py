"""Calls in answers, in the form in which OpenAI's clients read them."""

from __future__ import annotations

import secrets
import string
from typing import Any

from quire.server.tool_use import ToolUse
from quire.text.tool_calls import CallDelta, CallParser, ToolFormat

ID_ALPHABET = string.ascii_letters + string.digits


class SampleCalls:
    """One sample's text, told as content and calls.

    Args:
        use: what the request said about calls.
    """

    def __init__(self, use: ToolUse) -> None:
        self._form = use.form
        self._parser = CallParser(use.form, use.names, is_forced=use.is_forced)

    def deltas(self, text: str, *, is_finished: bool) -> list[dict[str, Any]]:
        """Return the deltas of a stream that new text gives.

        Args:
            text: the new text.
            is_finished: it is the last one.
        """
        pieces = self._parser.push(text)
        if is_finished:
            pieces += self._parser.finish()
        deltas: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, str):
                deltas.append({"content": piece})
            elif piece.name is not None or piece.arguments:
                deltas.append({"tool_calls": [{"index": piece.index, **self._part(piece)}]})
        return deltas

    def message(self, text: str) -> dict[str, Any]:
        """Return the fields of a whole message."""
        pieces = [*self._parser.push(text), *self._parser.finish()]
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, CallDelta):
                if piece.name is not None:
                    calls.append(self._part(piece))
                else:
                    calls[-1]["function"]["arguments"] += piece.arguments
        return {"content": content or None, "tool_calls": calls} if calls else {"content": content}

    def finish_reason(self, reason: str | None) -> str | None:
        """Return why an output ended: "tool_calls" where it came to its end and calls something."""
        if reason == "stop" and self._parser.num_calls and not self._parser.is_inside_call:
            return "tool_calls"
        return reason

    def _part(self, piece: CallDelta) -> dict[str, Any]:
        if piece.name is None:
            return {"function": {"arguments": piece.arguments}}
        named = {"name": piece.name, "arguments": piece.arguments}
        return {"id": new_call_id(self._form), "type": "function", "function": named}


def new_call_id(form: ToolFormat) -> str:
    """Return an id for a call that the model's template takes back."""
    if form.id_chars is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(ID_ALPHABET) for _ in range(form.id_chars))
