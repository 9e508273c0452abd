"""Mistral's formats: `[TOOL_CALLS]` and an array of objects, or a mark with a name and arguments for each call."""

from __future__ import annotations

from quire.text.tool_calls import grammar
from quire.text.tool_calls.grammar import CallRules
from quire.text.tool_calls.incoming import Incoming, Reading
from quire.text.tool_calls.object_calls import read_arguments, read_series
from quire.text.tool_calls.parser import CallReader

MARK, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class Mistral:
    """Both forms are parsed for every model; the template determines the form of the grammar.

    Source: Mistral 7B v0.3, Nemo and Small (an array); Small 3.2, Magistral and Devstral (names, with ids or without).
    """

    name = "mistral"
    marker = MARK
    other_markers = (ARGS, CALL_ID)
    may_be_bare = False
    # Mistral's templates refuse any other id.
    id_chars = 9
    answer_head = ""

    def __init__(self, *, is_array: bool, has_ids: bool = False) -> None:
        self.is_array = is_array
        self.has_ids = has_ids

    @classmethod
    def for_template(cls, source: str) -> Mistral:
        """Return the format in the form that a template shows."""
        return cls(is_array=ARGS not in source, has_ids=CALL_ID in source)

    @staticmethod
    def is_shown_by(source: str) -> bool:
        """Return whether a chat template shows the format to the model."""
        return MARK in source

    def read_calls(self, incoming: Incoming, pos: int, reader: CallReader) -> Reading:
        """Read an array of calls, or one call."""
        bracket = yield from incoming.literal(pos, "[")
        if bracket is not None:
            return (yield from read_series(incoming, bracket, reader, ",", "]"))
        return (yield from self._read_named(incoming, pos, reader))

    def grammar(self, rules: CallRules) -> str:
        """Return the grammar: free text, optionally followed by calls; or calls only."""
        opened = grammar.marker(MARK, rules.tokens)
        if self.is_array:
            more = ' (", " object)*' if rules.is_parallel else ""
            lines = [*grammar.object_calls(rules, "arguments"), f'calls: / ?\\[/ object{more} "]"']
        else:
            args = grammar.marker(ARGS, rules.tokens)
            if self.has_ids:
                args = f"({grammar.marker(CALL_ID, rules.tokens)} /[a-zA-Z0-9]{{{self.id_chars}}}/)? {args}"
            options = (f'"{function.name}" {args} args_{idx}' for idx, function in enumerate(rules.functions))
            more = f" ({opened} call)*" if rules.is_parallel else ""
            lines = [f"call: {' | '.join(options)}", f"calls: call{more}", *grammar.arguments(rules)]
        if rules.is_required:
            return grammar.whole([f"start: {opened} calls", *lines])
        return grammar.whole(["start: free | opened calls", *grammar.free_text(rules, MARK), *lines])

    def _read_named(self, incoming: Incoming, pos: int, reader: CallReader) -> Reading:
        """Read a name, an optional id of the call, and arguments."""
        begin = yield from incoming.past_space(pos)
        assert begin is not None
        end = yield from incoming.name(begin)
        name = None if end is None else incoming.text[begin:end]
        if end is None or name is None or name not in reader.functions:
            return None
        if end < len(incoming.text):
            reader.note_name(name)
        marked = yield from incoming.literal(end, CALL_ID)
        if marked is not None:
            end = yield from incoming.name(marked)
            if end is None:
                return None
        marked = yield from incoming.literal(end, ARGS)
        begin = yield from incoming.past_space(end if marked is None else marked)
        assert begin is not None
        if (yield from incoming.literal(begin, "{")) is None:
            return None
        return (yield from read_arguments(incoming, begin, reader, name))
