"""The calls of one sample: its text told as content and calls, as it comes or in one piece."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass
from typing import Any

from quire.text.tool_calls.calls import CallDelta, Piece, merge
from quire.text.tool_calls.parser import CallParser, ToolFormat
from quire.text.tool_calls.use import ToolUse

ID_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function.

    Args:
        id: what the message with its result names; of the form that the model's template takes back.
        name: of the function.
        arguments: JSON, as the model wrote it; a part of it where the output was cut off inside the call.
    """

    id: str
    name: str
    arguments: str

    def as_message(self) -> dict[str, Any]:
        """Return the call as it stands in the assistant's message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class SampleCalls:
    """One sample's text, told as content and calls.

    Args:
        use: what the request said about calls.
    """

    def __init__(self, use: ToolUse) -> None:
        self._form = use.form
        self._is_named = use.is_named
        self._parser = CallParser(use.form, use.names, is_forced=use.is_forced)

    def pieces(self, text: str, *, is_finished: bool) -> list[Piece]:
        """Return what new text makes certain.

        Args:
            text: the new text.
            is_finished: it is the last one.
        """
        pieces = self._parser.push(text)
        if is_finished:
            pieces += self._parser.finish()
        return pieces

    def whole(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the content and the calls of a whole text."""
        pieces = merge(self.pieces(text, is_finished=True))
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [
            ToolCall(self.new_id(), piece.name, piece.arguments)
            for piece in pieces
            if isinstance(piece, CallDelta) and piece.name is not None
        ]
        return content, calls

    def finish_reason(self, reason: str | None) -> str | None:
        """Return why an output ended: "tool_calls" where it came to its end and calls something.

        Where the client named the function, "stop" stays, as with OpenAI: that there is a call was no choice.
        """
        if reason == "stop" and self._parser.num_calls and not self._parser.is_inside_call and not self._is_named:
            return "tool_calls"
        return reason

    def new_id(self) -> str:
        """Return an id for a call."""
        return new_call_id(self._form)


def new_call_id(form: ToolFormat) -> str:
    """Return an id for a call that the model's template takes back."""
    if form.id_chars is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(ID_ALPHABET) for _ in range(form.id_chars))
