"""Qwen3-Coder's and Qwen3.5's format: `<tool_call>`, a function and its parameters in tags, `</tool_call>`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from quire.text.schemas.forms import Array, Boolean, Form, Null, Number, Object, State, Text
from quire.text.schemas.patterns import quoted
from quire.text.tool_calls import grammar
from quire.text.tool_calls.argument_schema import forms_of, objects_of, read_schema, types_of
from quire.text.tool_calls.calls import Function
from quire.text.tool_calls.grammar import CallRules, literal
from quire.text.tool_calls.incoming import Incoming, Reading
from quire.text.tool_calls.parser import CallReader
from quire.text.tool_calls.typed_values import typed_json
from quire.text.tool_calls.value_grammar import ABILITIES, ValueRules, ValueSyntax, repeated
from quire.text.tool_calls.value_reading import CallWriter

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
KEY = re.compile(r"[^>\n]*")
MAX_KEY_CHARS = 256
# All values except strings are JSON.
SYNTAX = ValueSyntax(words={word: word for word in ("true", "false", "null")}, comma=", ", colon=": ")
KEY_SYNTAX = replace(SYNTAX, bare_key="[a-zA-Z0-9_.-]{1,64}")
# Name of a type -> regular expression of the texts that are read as its values, without white space around them.
INTEGER = "-?(0|[1-9][0-9]*)"
EXPONENT = r"[eE][+\-]?[0-9]+"
SPELLINGS: Mapping[str, str] = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": INTEGER,
    "number": rf"{INTEGER}(\.[0-9]+({EXPONENT})?|{EXPONENT})",
    "array": r"\[(?s:.*)",
    "object": r"\{(?s:.*)",
}


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
        """Read the parameters and the end of the function; return None if they are broken."""
        schema = read_schema(function, ABILITIES)
        yield from writer.begin()
        while True:
            closed = yield from incoming.literal(pos, END_FUNCTION)
            if closed is not None:
                return closed
            begin = yield from incoming.literal(pos, PARAMETER)
            end = None if begin is None else (yield from incoming.matching(begin, KEY, MAX_KEY_CHARS))
            opened = None if end is None else (yield from incoming.literal(end, ">"))
            # A value may not contain another call's beginning, since many broken calls would take quadratic time.
            after = (
                None if opened is None else (yield from incoming.past(opened, END_PARAMETER, "" if is_forced else OPEN))
            )
            if begin is None or end is None or opened is None or after is None:
                return None
            key = incoming.text[begin:end]
            text = incoming.text[opened : after - len(END_PARAMETER)].removeprefix("\n").removesuffix("\n")
            yield from writer.member(key, typed_json(text, types_of(schema, key)))
            pos = after

    def grammar(self, rules: CallRules) -> str:
        """Return the grammar: free text with calls in it; or calls only, on separate lines."""
        lines = []
        for idx, function in enumerate(rules.functions):
            lines += _function(f"f{idx}", function, rules)
        close = grammar.marker(CLOSE, rules.tokens)
        lines.append(f"object: {' | '.join(f'f{idx}' for idx in range(len(rules.functions)))}")
        lines.append(f'body: "\\n" object "\\n" {close}')
        return grammar.whole([*grammar.lines_of_calls(rules, OPEN), *lines])


def _function(name: str, function: Function, rules: CallRules) -> list[str]:
    """Return the rules of one function: its parameters in order, then others if the schema allows them."""
    values = ValueRules.of(function, SYNTAX, f"{name}_", rules.tokens)
    options = (_parameters(values, form) for form in objects_of(values.schema))
    head, end = literal(f"{FUNCTION}{function.name}>\n"), literal(END_FUNCTION)
    return [f"{name}: {head} ({' | '.join(options)}) {end}", *values.lines]


def _parameters(values: ValueRules, form: Object) -> str:
    """Return the expression of all parameters."""
    parts = []
    for key, state in form.properties:
        if values.schema.forms(state):
            head = literal(f"{PARAMETER}{key}>\n")
            value = _value(values, state, types_of(values.schema, key))
            parts.append(f"({head} {value}){'' if key in form.required else '?'}")
    if values.schema.forms(form.additional):
        name = values.other_key(KEY_SYNTAX, [key for key, _ in form.properties])
        value = _value(values, form.additional, types_of(values.schema, None))
        part = f"{literal(PARAMETER)} {name} {literal('>' + chr(10))} {value}"
        parts.append(repeated(part, form.min_others, form.max_others))
    return " ".join(parts) or literal("")


def _value(values: ValueRules, state: State, read: Collection[str]) -> str:
    """Return the expression of a parameter's value and its end."""
    forms = forms_of(values.schema, state)
    end = literal(f"\n{END_PARAMETER}\n")
    texts = [form for form in forms if isinstance(form, Text)]
    if not texts:
        return f"({values.options(forms)}) {end}"
    # The lexer takes the longest terminal, so values that may begin alike share one terminal: strings and, as far as
    # they have an expression, words and numbers. Strings that would be read as other values are excluded.
    apart = [form for form in forms if isinstance(form, Array | Object) or _is_limited(form)]
    options = [f"({values.options(apart)}) {end}"] if apart else []
    free = {kind for form in forms if form not in apart for kind in _free_types(form)}
    spellings = [SPELLINGS[kind] for kind in sorted(SPELLINGS.keys() & set(read) - free)]
    spellings += ["-?[0-9](?s:.*)"] if any(map(_is_limited, apart)) else []
    excluded = f"[ \\t\\n\\r]*({'|'.join(spellings)})[ \\t\\n\\r]*" if spellings else ""
    others = "|".join(filter(None, (_written(form) for form in forms if form not in apart)))
    ended = values.rule(f"{values.text(texts, excluded, others)} {literal(chr(10) + END_PARAMETER)}", option="[lazy]")
    return f"({' | '.join([*options, f'{ended} {literal(chr(10))}'])})"


def _is_limited(form: Form) -> bool:
    """Return whether a form is a number with limits, which have no regular expression."""
    return isinstance(form, Number) and form.constants is None and replace(form, is_integer=False) != Number()


def _free_types(form: Form) -> Collection[str]:
    """Return the names of the types whose values all match a form."""
    if isinstance(form, Number):
        return () if form.constants is not None else ("integer",) if form.is_integer else ("integer", "number")
    if isinstance(form, Boolean):
        return ("boolean",) if len(form.values) > 1 else ()
    return ("null",) if isinstance(form, Null) else ()


def _written(form: Form) -> str:
    """Return the regular expression of the values of a form without limits; "" for strings."""
    if isinstance(form, Number) and form.constants is not None:
        return "|".join(quoted(json.dumps(value)) for value in form.constants)
    if isinstance(form, Number):
        return INTEGER if form.is_integer else rf"{INTEGER}(\.[0-9]+)?({EXPONENT})?"
    if isinstance(form, Boolean):
        return "|".join(json.dumps(value) for value in form.values)
    return "null" if isinstance(form, Null) else ""
