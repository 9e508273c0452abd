"""The content and the calls of one sample, read incrementally or from the whole text."""

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
        id: id for the message with the result, in a form that the model's template accepts.
        name: name of the function.
        arguments: JSON; truncated if the output was truncated inside the call.
    """

    id: str
    name: str
    arguments: str

    def as_message(self) -> dict[str, Any]:
        """Return the call as an entry of the assistant's message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class SampleCalls:
    """The parser of one sample's text."""

    def __init__(self, use: ToolUse) -> None:
        self._form = use.form
        self._num_earlier = use.num_earlier_calls
        self._is_named = use.is_named
        rules = use.rules
        self._parser = CallParser(use.form, rules.functions, is_forced=use.is_forced, is_required=rules.is_required)

    def pieces(self, text: str, *, is_finished: bool) -> list[Piece]:
        """Return the pieces that new text completes."""
        pieces = self._parser.push(text)
        if is_finished:
            pieces += self._parser.finish()
        return pieces

    def whole(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the content and the calls of a whole text."""
        pieces = merge(self.pieces(text, is_finished=True))
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [
            ToolCall(self.new_id(piece.name, piece.index), piece.name, piece.arguments)
            for piece in pieces
            if isinstance(piece, CallDelta) and piece.name is not None
        ]
        return content, calls

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the finish reason of an output: "tool_calls" if it stopped by itself after a complete call.

        If the client named the function, "stop" stays, as with OpenAI, because the model did not choose to call it.
        """
        return "tool_calls" if reason == "stop" and self.has_whole_calls and not self._is_named else reason

    @property
    def has_whole_calls(self) -> bool:
        """True if there are calls, and the last one is complete."""
        return bool(self._parser.num_calls) and not self._parser.is_inside_call

    def new_id(self, name: str, index: int) -> str:
        """Return an id for the call with an index, in a form that the model's template accepts."""
        return new_call_id(self._form, name, self._num_earlier + index)


def new_call_id(form: ToolFormat, name: str, number: int) -> str:
    """Return the id of a call of a function.

    Args:
        form: format of the calls.
        name: name of the function.
        number: number of calls before it in the conversation.
    """
    if form.counted_id:
        return form.counted_id.format(name=name, number=number)
    if form.id_chars is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(ID_ALPHABET) for _ in range(form.id_chars))
