"""Hermes' and Qwen's format: `<tool_call>`, a JSON object with name and arguments, `</tool_call>`."""

from __future__ import annotations

from quire.text.tool_calls import grammar
from quire.text.tool_calls.grammar import CallRules
from quire.text.tool_calls.incoming import Incoming, Reading
from quire.text.tool_calls.object_calls import stream_call, whole_call
from quire.text.tool_calls.parser import CallReader

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Marks of other formats with the same marker, but without JSON after it.
OTHERS = ("<function=", "<arg_key>")


class Hermes:
    """One object between marks for each call, with text anywhere outside.

    Source: Hermes 2 Pro; Qwen 2.5 and 3.
    """

    name = "hermes"
    marker = OPEN
    other_markers = (CLOSE,)
    may_be_bare = False
    id_chars = None
    answer_head = ""

    @classmethod
    def for_template(cls, source: str) -> Hermes:
        """Return the format; templates do not change it."""
        del source
        return cls()

    @staticmethod
    def is_shown_by(source: str) -> bool:
        """Return whether a chat template shows the format to the model."""
        return OPEN in source and not any(other in source for other in OTHERS)

    def read_calls(self, incoming: Incoming, pos: int, reader: CallReader) -> Reading:
        """Read one call and its closing mark, which the end of the output or a stop string may truncate."""
        if reader.is_forced:
            end = yield from stream_call(incoming, pos, reader)
            closed = None if end is None else (yield from incoming.literal(end, CLOSE, may_be_cut=True))
            return end if closed is None else closed
        reading = yield from whole_call(incoming, pos, reader.functions)
        closed = None if reading is None else (yield from incoming.literal(reading[1], CLOSE, may_be_cut=True))
        if reading is not None and closed is not None:
            yield reader.whole_call(*reading[0])
        return closed

    def grammar(self, rules: CallRules) -> str:
        """Return the grammar: free text with calls in it; or calls only, on separate lines."""
        lines = grammar.object_calls(rules, "arguments")
        close = grammar.marker(CLOSE, rules.tokens)
        lines += [f'body: "\\n" object "\\n" {close}']
        return grammar.whole([*grammar.lines_of_calls(rules, OPEN), *lines])
