"""Grammars of values that a format does not write as JSON, from their JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import InvalidParameter, shown
from quire.sequences.closed_schema import close_objects
from quire.text.tool_calls.calls import Function
from quire.text.tool_calls.grammar import ANNOTATIONS, LAYOUT, bare_schema, literal
from quire.text.tool_calls.typed_values import TYPES, Schema, resolve, types_of

NUMBER_KEYS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
STRING_KEYS = ("minLength", "maxLength", "pattern")
# Keys of schemas that the rules enforce, in addition to those above.
ENFORCED = ANNOTATIONS | {
    *("type", "enum", "const", "anyOf", "oneOf", "$ref", "$defs", "definitions", "x-guidance"),
    *("properties", "required", "additionalProperties", "items", "minItems", "maxItems", *NUMBER_KEYS, *STRING_KEYS),
}
LIMIT_KEYS = ("minItems", "maxItems", "minLength", "maxLength")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSyntax:
    """The spelling of values.

    Args:
        words: spelling of true, false and null.
        comma: separator of members and of items.
        colon: separator of a key and a value.
        bare_key: regular expression of the keys that are written without quotes; "" quotes all.
        quote: marker before and after a string, which has no escapes then; "" for strings as in JSON.
        is_sorted: True where keys are in the order of the alphabet.
    """

    words: Mapping[str, str]
    comma: str
    colon: str
    bare_key: str = ""
    quote: str = ""
    is_sorted: bool = False


@dataclass(slots=True)
class ValueRules:
    """The rules of one function's values.

    Args:
        function: the function.
        syntax: spelling of values.
        prefix: beginning of the rules' names.
        tokens: token ids of the markers that are single tokens.
    """

    function: Function
    syntax: ValueSyntax
    prefix: str
    tokens: Mapping[str, int]
    lines: list[str] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)
    _num_names: int = 0

    @property
    def root(self) -> Schema:
        """The schema of the arguments, without annotations, and without further keys unless it asks for them."""
        return close_objects(bare_schema(self.function.parameters))

    def new_name(self, letter: str) -> str:
        """Return a name that no other rule has."""
        self._num_names += 1
        return f"{self.prefix}{letter}{self._num_names}"

    def value(self, schema: object) -> str:
        """Return the name of the rule for a value.

        Raises:
            InvalidParameter: the function is strict, and a part of the schema cannot be enforced.
        """
        key = json.dumps(schema, sort_keys=True)
        if key not in self._names:
            self._names[key] = name = self.new_name("v")
            self.lines.append(f"{name}: {' | '.join(self._options(schema))}")
        return self._names[key]

    def members(self, schema: Schema, syntax: ValueSyntax) -> str:
        """Return the name of the rule for the members of an object, without its brackets.

        Args:
            schema: schema of the object.
            syntax: spelling of the members.
        """
        listed = schema.get("properties")
        properties = list(listed.items()) if isinstance(listed, Mapping) else []
        if syntax.is_sorted:
            properties.sort(key=lambda each: each[0].lower())
        required = set(schema.get("required") or ())
        name = f"{self.new_name('m')}_"
        comma = literal(syntax.comma)
        # `first` begins the object at a member, `rest` continues it there.
        for idx, (key, inner) in enumerate(properties):
            member = f"{literal(self._key(key, syntax) + syntax.colon)} {self.value(inner)} {name}rest{idx + 1}"
            skip = "" if key in required else " | {}"
            self.lines.append(f"{name}first{idx}: {member}{skip.format(f'{name}first{idx + 1}')}")
            self.lines.append(f"{name}rest{idx}: {comma} {member}{skip.format(f'{name}rest{idx + 1}')}")
        first = rest = literal("")
        further = schema.get("additionalProperties", True)
        if further is not False:
            keys = f"/{syntax.bare_key}/" if syntax.bare_key else self._string({})
            self.lines.append(f"{name}more: {keys} {literal(syntax.colon)} {self.value(further)}")
            rest = f"({comma} {name}more)*"
            first = f"({name}more {rest})?"
        last = len(properties)
        self.lines += [f"{name}first{last}: {first}", f"{name}rest{last}: {rest}"]
        return f"{name}first0"

    def text(self, schema: Schema) -> str:
        """Return the name of the terminal for the text of a string."""
        least, most, pattern = (schema.get(key) for key in STRING_KEYS)
        limits = f"{{{least or 0},{'' if most is None else most}}}"
        parts = [f"/(?s:.{limits if least or most is not None else '*'})/"]
        if isinstance(pattern, str):
            begin = "" if pattern.startswith("^") else "(?s:.*)"
            end = "" if pattern.endswith("$") else "(?s:.*)"
            pattern = pattern.removeprefix("^").removesuffix("$").replace("/", r"\/")
            parts.append(f"/{begin}({pattern}){end}/")
        name = self.new_name("t").upper()
        self.lines.append(f"{name}: {' & '.join(parts)}")
        return name

    def json(self, schema: Schema) -> str:
        """Return the terminal of a string or a number that is written as JSON."""
        layout = {**LAYOUT, "lenient": not self.function.is_strict}
        return f"%json {json.dumps({**schema, 'x-guidance': layout}, ensure_ascii=False)}"

    def check(self, schema: Schema, kinds: frozenset[str] = frozenset()) -> None:
        """Check that a schema is one, and that it is enforced where the function is strict.

        Args:
            schema: the schema.
            kinds: further keys that are enforced.

        Raises:
            InvalidParameter: a key has a value that it cannot have, or is not enforced.
        """
        wrong = _wrong_key(schema)
        if wrong is not None:
            allowed = f"a JSON schema that compiles: {wrong[0]} is {wrong[1]}, got {shown(schema[wrong[0]])}"
            raise InvalidParameter(self.function.field, self.function.parameters, allowed)
        unknown = sorted(schema.keys() - ENFORCED - kinds)
        if unknown and self.function.is_strict:
            allowed = f"a schema without {unknown[0]}, which a strict tool of this model cannot enforce"
            raise InvalidParameter(self.function.field, self.function.parameters, allowed)

    def _options(self, schema: object) -> list[str]:
        schema = resolve(schema, self.root)
        self.check(schema, frozenset({"format"} if not self.syntax.quote else ()))
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return [self._written(value) for value in values]
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                return [self.value(part) for part in schema[key]]
        kinds = types_of(schema, self.root) & TYPES
        if "number" in kinds:
            kinds -= {"integer"}
        return [self._of_kind(kind, schema) for kind in sorted(kinds)]

    def _of_kind(self, kind: str, schema: Schema) -> str:
        comma = literal(self.syntax.comma)
        if kind == "string":
            return self._string(schema)
        if kind in ("integer", "number"):
            return self._rule(self.json({"type": kind} | {key: schema[key] for key in NUMBER_KEYS if key in schema}))
        if kind == "boolean":
            return f"{literal(self.syntax.words['true'])} | {literal(self.syntax.words['false'])}"
        if kind == "null":
            return literal(self.syntax.words["null"])
        if kind == "object":
            return f'"{{" {self.members(schema, self.syntax)} "}}"'
        item = self.value(schema.get("items", {}))
        least, most = schema.get("minItems") or 0, schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f"({comma} {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return f'"[" ({item} {more}){"" if least else "?"} "]"'

    def _string(self, schema: Schema) -> str:
        """Return the expression of a string in its quotes."""
        if not self.syntax.quote:
            keys = (*STRING_KEYS, "format")
            return self._rule(self.json({"type": "string"} | {key: schema[key] for key in keys if key in schema}))
        quote, text = self.syntax.quote, self.text(schema)
        ended = self._rule(f"{text} {literal(quote)}", "[lazy]")
        if quote not in self.tokens:
            return f"{literal(quote)} {ended}"
        token = f"<[{self.tokens[quote]}]>"
        return f"{token} ({ended} | {text} {token})"

    def _rule(self, body: str, option: str = "") -> str:
        name = self.new_name("r")
        self.lines.append(f"{name}{option}: {body}")
        return name

    def _key(self, key: str, syntax: ValueSyntax) -> str:
        if syntax.bare_key and re.fullmatch(syntax.bare_key, key):
            return key
        quote = syntax.quote
        return f"{quote}{key}{quote}" if quote else json.dumps(key, ensure_ascii=False)

    def _written(self, value: Any) -> str:
        """Return the expression of one value."""
        syntax = self.syntax
        if isinstance(value, str) and syntax.quote:
            mark = f"<[{self.tokens[syntax.quote]}]>" if syntax.quote in self.tokens else literal(syntax.quote)
            return f"{mark} {literal(value)} {mark}" if value else f"{mark} {mark}"
        if isinstance(value, bool) or value is None:
            return literal(syntax.words[json.dumps(value)])
        if isinstance(value, Mapping):
            keys = (literal(self._key(key, syntax) + syntax.colon) for key in value)
            members = [f"{key} {self._written(one)}" for key, one in zip(keys, value.values(), strict=True)]
            return f'"{{" {_joined(members, syntax.comma)} "}}"'
        if isinstance(value, list):
            return f'"[" {_joined([self._written(one) for one in value], syntax.comma)} "]"'
        return literal(json.dumps(value, ensure_ascii=False))


def _wrong_key(schema: Schema) -> tuple[str, str] | None:
    """Return the first key whose value no schema has, and what it may be; None where there is none."""
    for key, value in schema.items():
        if value is None:  # as if it was left out
            continue
        if key == "type":
            names = value if isinstance(value, list) else [value]
            if not all(isinstance(name, str) and name in TYPES for name in names):
                return key, f"one of {', '.join(sorted(TYPES))}, or a list of them"
        elif key == "required":
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                return key, "a list of strings"
        elif key in ("properties", "$defs", "definitions"):
            if not isinstance(value, Mapping):
                return key, "an object"
        elif key in ("enum", "anyOf", "oneOf"):
            if not isinstance(value, list) or not value:
                return key, "a list that is not empty"
        elif key in LIMIT_KEYS:
            if type(value) is not int or value < 0:
                return key, "an integer from 0 on"
        elif key == "pattern":
            if not isinstance(value, str):
                return key, "a string"
        elif key in NUMBER_KEYS and (isinstance(value, bool) or not isinstance(value, int | float)):
            return key, "a number"
    return None


def _joined(parts: Sequence[str], comma: str) -> str:
    return f" {literal(comma)} ".join(parts) or literal("")
