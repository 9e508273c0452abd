"""Gemma 4's format: `<|tool_call>call:`, a name, arguments in braces with marked strings, `<tool_call|>`."""

from __future__ import annotations

from quire.text.tool_calls import grammar
from quire.text.tool_calls.argument_schema import objects_of
from quire.text.tool_calls.grammar import CallRules, literal
from quire.text.tool_calls.incoming import Incoming, Reading
from quire.text.tool_calls.parser import CallReader
from quire.text.tool_calls.value_grammar import ValueRules, ValueSyntax
from quire.text.tool_calls.value_reading import CallWriter, ValueReader

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CALL = "call:"
KEY = "[a-zA-Z0-9_.$-]{1,64}"
WORDS = {word: word for word in ("true", "false", "null")}
SYNTAX = ValueSyntax(words=WORDS, comma=",", colon=":", bare_key=KEY, quote=QUOTE, is_sorted=True)
VALUES = ValueReader(quote=QUOTE, bare_key="[a-zA-Z0-9_.$-]*")


class Gemma4:
    """Keys have no quotes; a string is between two marks, and has no escapes.

    Source: Gemma 4.
    """

    name = "gemma4"
    marker = OPEN
    other_markers = (CLOSE, QUOTE)
    may_be_bare = False
    id_chars = None
    answer_head = ""

    @classmethod
    def for_template(cls, source: str) -> Gemma4:
        """Return the format; templates do not change it."""
        del source
        return cls()

    @staticmethod
    def is_shown_by(source: str) -> bool:
        """Return whether a chat template shows the format to the model."""
        return OPEN in source

    def read_calls(self, incoming: Incoming, pos: int, reader: CallReader) -> Reading:
        """Read one call and its closing mark, which the end of the output or a stop string may truncate."""
        begin = yield from incoming.literal(pos, CALL)
        end = None if begin is None else (yield from incoming.name(begin))
        opened = None if end is None else (yield from incoming.literal(end, "{"))
        if begin is None or end is None or opened is None or incoming.text[begin:end] not in reader.functions:
            return None
        writer = CallWriter(reader, incoming.text[begin:end])
        closed = yield from VALUES.call(incoming, opened, writer, ":", "}")
        if closed is None:
            return writer.broken(incoming, opened)
        after = yield from incoming.literal(closed, CLOSE, may_be_cut=True)
        if after is None and not reader.is_forced:
            return None
        yield from writer.end()
        return closed if after is None else after

    def grammar(self, rules: CallRules) -> str:
        """Return the grammar: free text with calls in it, or calls one after the other."""
        options, lines = [], []
        for idx, function in enumerate(rules.functions):
            values = ValueRules.of(function, SYNTAX, f"f{idx}_", rules.tokens)
            head = literal(f"{CALL}{function.name}{{")
            options += [f'{head} {values.members(form, SYNTAX)} "}}"' for form in objects_of(values.schema)]
            lines += values.lines
        lines.append(f"object: {' | '.join(options)}")
        lines.append(f"body: object {grammar.marker(CLOSE, rules.tokens)}")
        return grammar.whole([*grammar.lines_of_calls(rules, OPEN, separator=""), *lines])
