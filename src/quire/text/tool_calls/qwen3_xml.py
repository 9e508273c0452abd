"""Qwen3-Coder's and Qwen3.5's format: `<tool_call>`, a function and its parameters in tags, `</tool_call>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from quire.text.tool_calls import grammar
from quire.text.tool_calls.calls import Function
from quire.text.tool_calls.grammar import CallRules, literal
from quire.text.tool_calls.incoming import Incoming, Reading
from quire.text.tool_calls.parser import CallReader
from quire.text.tool_calls.typed_values import Schema, resolve, typed_json, types_of
from quire.text.tool_calls.value_grammar import ValueRules, ValueSyntax
from quire.text.tool_calls.value_reading import CallWriter

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
KEY = re.compile(r"[^>\n]*")
MAX_KEY_CHARS = 256
# Only strings are not JSON.
SYNTAX = ValueSyntax(words={word: word for word in ("true", "false", "null")}, comma=", ", colon=": ")


class Qwen3Xml:
    """Strings are written without quotes; the schema decides which values are strings.

    Source: Qwen3-Coder, Qwen3-Next and Qwen3.5.
    """

    name = "qwen3_xml"
    marker = OPEN
    other_markers = (CLOSE,)
    may_be_bare = False
    id_chars = None
    answer_head = ""

    @classmethod
    def for_template(cls, source: str) -> Qwen3Xml:
        """Return the format; templates do not change it."""
        del source
        return cls()

    @staticmethod
    def is_shown_by(source: str) -> bool:
        """Return whether a chat template shows the format to the model."""
        return OPEN in source and FUNCTION in source and PARAMETER in source

    def read_calls(self, incoming: Incoming, pos: int, reader: CallReader) -> Reading:
        """Read one call and its closing mark, which the end of the output or a stop string may truncate."""
        begin = yield from incoming.literal(pos, FUNCTION)
        end = None if begin is None else (yield from incoming.name(begin))
        opened = None if end is None else (yield from incoming.literal(end, ">"))
        if begin is None or end is None or opened is None or incoming.text[begin:end] not in reader.functions:
            return None
        function = reader.functions[incoming.text[begin:end]]
        writer = CallWriter(reader, function.name)
        closed = yield from self._read_parameters(incoming, opened, function, writer, is_forced=reader.is_forced)
        if closed is None:
            return writer.broken(incoming, opened)
        after = yield from incoming.literal(closed, CLOSE, may_be_cut=True)
        if after is None and not reader.is_forced:
            return None
        yield from writer.end()
        return closed if after is None else after

    def _read_parameters(
        self, incoming: Incoming, pos: int, function: Function, writer: CallWriter, *, is_forced: bool
    ) -> Reading:
        """Read the parameters and the end of the function; None where they are broken."""
        root = function.parameters
        properties = resolve(root, root).get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        yield from writer.begin()
        while True:
            closed = yield from incoming.literal(pos, END_FUNCTION)
            if closed is not None:
                return closed
            begin = yield from incoming.literal(pos, PARAMETER)
            end = None if begin is None else (yield from incoming.matching(begin, KEY, MAX_KEY_CHARS))
            opened = None if end is None else (yield from incoming.literal(end, ">"))
            # Another call's beginning in a value would make many broken calls quadratic; a grammar excludes them.
            after = (
                None if opened is None else (yield from incoming.past(opened, END_PARAMETER, "" if is_forced else OPEN))
            )
            if begin is None or end is None or opened is None or after is None:
                return None
            key = incoming.text[begin:end]
            text = incoming.text[opened : after - len(END_PARAMETER)].removeprefix("\n").removesuffix("\n")
            yield from writer.member(key, typed_json(text, schemas.get(key, {}), root))
            pos = after

    def grammar(self, rules: CallRules) -> str:
        """Return the grammar: free text with calls in it, or calls on separate lines only."""
        lines = []
        for idx, function in enumerate(rules.functions):
            lines += _function(f"f{idx}", function, rules)
        close = grammar.marker(CLOSE, rules.tokens)
        lines.append(f"object: {' | '.join(f'f{idx}' for idx in range(len(rules.functions)))}")
        lines.append(f'body: "\\n" object "\\n" {close}')
        return grammar.whole([*grammar.lines_of_calls(rules, OPEN), *lines])


def _function(name: str, function: Function, rules: CallRules) -> list[str]:
    """Return the rules of one function: its parameters in their order, and further ones where the schema asks."""
    values = ValueRules(function, SYNTAX, f"{name}_", rules.tokens)
    root = resolve(values.root, values.root)
    values.check(root)
    listed = root.get("properties")
    required = root.get("required") or ()
    parts = []
    for key, schema in listed.items() if isinstance(listed, Mapping) else ():
        head = literal(f"{PARAMETER}{key}>\n")
        parts.append(f"({head} {_value(values, schema)}){'' if key in required else '?'}")
    further = root.get("additionalProperties", True)
    if further is not False:
        parts.append(
            f"({literal(PARAMETER)} /[a-zA-Z0-9_.-]{{1,64}}/ {literal('>' + chr(10))} {_value(values, further)})*"
        )
    head, end = literal(f"{FUNCTION}{function.name}>\n"), literal(END_FUNCTION)
    return [f"{name}: {' '.join([head, *parts, end])}", *values.lines]


def _value(values: ValueRules, schema: object) -> str:
    """Return the expression of a parameter's value and its end."""
    resolved: Schema = resolve(schema, values.root)
    end = literal(f"\n{END_PARAMETER}\n")
    choices = [resolved["const"]] if "const" in resolved else resolved.get("enum")
    if isinstance(choices, list):
        values.check(resolved)
        texts = (one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in choices)
        return f"({' | '.join(literal(text) for text in texts)}) {end}"
    parts = resolved.get("anyOf", resolved.get("oneOf"))
    if isinstance(parts, list) and parts:
        return f"({' | '.join(_value(values, part) for part in parts)})"
    kinds = types_of(resolved, values.root)
    if "string" not in kinds:
        return f"{values.value(schema)} {end}"
    values.check(resolved)
    # Every text is a value: one that is no other allowed type is a string.
    name = values.new_name("x")
    text = values.text(resolved if kinds == {"string"} else {})
    values.lines.append(f"{name}[lazy]: {text} {literal(chr(10) + END_PARAMETER)}")
    return f'{name} "\\n"'
