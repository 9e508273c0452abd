"""LFM2's format: a list of calls in Python's syntax, between `<|tool_call_start|>` and `<|tool_call_end|>`."""

from __future__ import annotations

from dataclasses import replace

from quire.text.chat.written_calls import CLOSE, OPEN, SHOWN, WORDS
from quire.text.tool_calls import grammar
from quire.text.tool_calls.argument_schema import objects_of
from quire.text.tool_calls.calls import CallDelta
from quire.text.tool_calls.grammar import CallRules, literal
from quire.text.tool_calls.incoming import Incoming, Reading
from quire.text.tool_calls.parser import CallReader
from quire.text.tool_calls.value_grammar import ValueRules, ValueSyntax
from quire.text.tool_calls.value_reading import CallWriter, ValueReader

SYNTAX = ValueSyntax(words=WORDS, comma=", ", colon=": ")
# Arguments of a call have keys without quotes.
ARGUMENTS = replace(SYNTAX, colon="=", bare_key="[a-zA-Z0-9_.-]{1,64}")
VALUES = ValueReader(bare_key="[a-zA-Z0-9_.-]*")


class Lfm2:
    """Calls have named arguments, whose values are Python literals.

    Source: LFM2 and LFM2.5.
    """

    name = "lfm2"
    marker = OPEN
    other_markers = (CLOSE,)
    may_be_bare = False
    id_chars = None
    answer_head = ""

    @classmethod
    def for_template(cls, source: str) -> Lfm2:
        """Return the format; templates do not change it."""
        del source
        return cls()

    @staticmethod
    def is_shown_by(source: str) -> bool:
        """Return whether a chat template shows the format to the model."""
        return any(mark in source for mark in SHOWN)

    def read_calls(self, incoming: Incoming, pos: int, reader: CallReader) -> Reading:
        """Read a list of calls and the closing mark, which the end of the output or a stop string may truncate."""
        opened = yield from incoming.literal(pos, "[")
        if opened is None:
            return None
        calls: list[CallDelta] = []
        pos, end = opened, None
        while end is None:
            begin = yield from incoming.past_space(pos)
            assert begin is not None
            after = yield from incoming.name(begin)
            bracket = None if after is None else (yield from incoming.literal(after, "("))
            if after is None or bracket is None or incoming.text[begin:after] not in reader.functions:
                return pos if reader.is_forced and reader.num_calls else None
            writer = CallWriter(reader, incoming.text[begin:after])
            closed = yield from VALUES.call(incoming, bracket, writer, "=", ")")
            if closed is None:
                return writer.broken(incoming, bracket)
            for piece in writer.end():
                if reader.is_forced:
                    yield piece
                else:
                    assert isinstance(piece, CallDelta)
                    calls.append(piece)
            comma = yield from incoming.literal(closed, ",")
            pos = closed if comma is None else comma
            end = None if comma is not None else (yield from incoming.literal(closed, "]", may_be_cut=True))
            if comma is None and end is None:
                return closed if reader.is_forced else None
        assert end is not None
        marked = yield from incoming.literal(end, CLOSE, may_be_cut=True)
        if marked is None and not reader.is_forced:
            return None
        yield from calls
        return end if marked is None else marked

    def grammar(self, rules: CallRules) -> str:
        """Return the grammar: free text and a list of calls in it, or the list only."""
        options, lines = [], []
        for idx, function in enumerate(rules.functions):
            values = ValueRules.of(function, SYNTAX, f"f{idx}_", rules.tokens)
            head = literal(f"{function.name}(")
            options += [f'{head} {values.members(form, ARGUMENTS)} ")"' for form in objects_of(values.schema)]
            lines += values.lines
        more = ' (", " object)*' if rules.is_parallel else ""
        lines.append(f"object: {' | '.join(options)}")
        lines.append(f'body: "[" object{more} "]" {grammar.marker(CLOSE, rules.tokens)}')
        # One list contains all calls.
        return grammar.whole([*grammar.lines_of_calls(replace(rules, is_parallel=False), OPEN), *lines])
