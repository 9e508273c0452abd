"""Conversion of the normal form of a schema to a schema that `llguidance` compiles."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from quire.text.schemas.document import Node
from quire.text.schemas.forms import (
    ANY,
    Anything,
    Array,
    Boolean,
    Form,
    NormalSchema,
    Null,
    Number,
    Object,
    State,
    Text,
)
from quire.text.schemas.normal import JSON, normalise

# `llguidance` itself refuses patterns of names that overlap, with an exact comparison.
JSON_COMPILER = JSON._replace(compares_patterns=True)
# Maximum depth of inlined states; deeper ones become definitions.
MAX_DEPTH = 24
# An integer above this is written as limits: as a constant, `llguidance` would round it.
MAX_CONSTANT = 2**53


# Options of `llguidance` with which each name of a property has one spelling; strings then lack the control characters
# that need `\u`.
PLAIN_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}


class PlainSchema(NamedTuple):
    """A schema in plain keywords, without references, conditions and combinations.

    Args:
        schema: the schema.
        layout: options that it needs; without them, a declared property could be written in another spelling, as an
            additional one.
    """

    schema: dict[str, Any]
    layout: dict[str, Any]


def enforceable(schema: Node, *, is_closed: bool) -> PlainSchema:
    """Return the schema of an answer in the form that `llguidance` compiles."""
    return as_json(normalise(schema, is_closed=is_closed, is_strict=True, abilities=JSON_COMPILER))


def as_json(normal: NormalSchema) -> PlainSchema:
    """Return the schema of a normal form."""
    return _Writer(normal).write()


class _Writer:
    """Writes the states of one schema: inline if a state is small or used once, else as a definition."""

    def __init__(self, normal: NormalSchema) -> None:
        self._normal = normal
        self._counts: Counter[State] = Counter(
            inner for forms in normal.states for form in forms for inner in _inner(form)
        )
        self._definitions: dict[str, Any] = {}
        self._left: list[State] = []
        self._may_escape = True

    def write(self) -> PlainSchema:
        root = self._normal.root
        schema = self._state(root, 0) if self._counts[root] else self._schema(root, 0)
        while self._left:
            state = self._left.pop()
            self._definitions[str(state)] = self._schema(state, 1)
        if self._definitions:
            schema = {**schema, "$defs": self._definitions}
        return PlainSchema(schema, {} if self._may_escape else PLAIN_ESCAPES)

    def _state(self, state: State, depth: int) -> Any:
        """Return the schema of a state that another state uses."""
        forms = self._normal.forms(state)
        if state == ANY:
            return True
        if not forms:
            return False
        is_small = not any(isinstance(form, Array | Object) for form in forms)
        is_only_here = self._counts[state] == 1 and state != self._normal.root
        if is_small or (is_only_here and depth < MAX_DEPTH):
            return self._schema(state, depth)
        if str(state) not in self._definitions:
            self._definitions[str(state)] = {}
            self._left.append(state)
        return {"$ref": f"#/$defs/{state}"}

    def _schema(self, state: State, depth: int) -> dict[str, Any]:
        forms = self._normal.forms(state)
        constants = [one for form in forms for one in _constants(form)]
        options = [{"enum": constants}] if constants else []
        options += [self._form(form, depth + 1) for form in forms if not _constants(form)]
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _form(self, form: Form, depth: int) -> dict[str, Any]:
        if isinstance(form, Anything):
            return {}
        if isinstance(form, Null):
            return {"type": "null"}
        if isinstance(form, Boolean):
            return {"type": "boolean"}
        if isinstance(form, Number):
            return number_schema(form)
        if isinstance(form, Text):
            return text_schema(form)
        if isinstance(form, Array):
            schema: dict[str, Any] = {"type": "array"}
            if form.prefix:
                schema["prefixItems"] = [self._state(inner, depth) for inner in form.prefix]
            if form.items != ANY:
                schema["items"] = self._state(form.items, depth)
            limits = {"minItems": form.min_items or None, "maxItems": form.max_items}
            return schema | {key: value for key, value in limits.items() if value is not None}
        return self._object(form, depth)

    def _object(self, form: Object, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object"}
        if form.properties:
            schema["properties"] = {name: self._state(state, depth) for name, state in form.properties}
        if form.required:
            schema["required"] = [*form.required]
        patterns = {_whole(pattern): self._state(state, depth) for pattern, state in form.patterns}
        further = self._state(form.additional, depth)
        if form.names is not None:
            patterns, further = {_name_pattern(form.names): further}, False
        elif further is True and form.properties and not patterns:
            # Names that a pattern matches have one spelling; in another spelling, a declared name could be additional.
            patterns, further = {"": True}, False
        elif further is not False and (form.properties or patterns):
            self._may_escape = False
        if patterns:
            schema["patternProperties"] = patterns
        if further is not True:
            schema["additionalProperties"] = further
        if form.min_others:
            schema["minProperties"] = len(form.required) + form.min_others
        if form.max_others is not None:
            schema["maxProperties"] = len(form.required) + form.max_others
        return schema


def _inner(form: Form) -> list[State]:
    """Return the states in a form."""
    if isinstance(form, Array):
        return [*form.prefix, form.items]
    if isinstance(form, Object):
        return [*(state for _, state in (*form.properties, *form.patterns)), form.additional]
    return []


def _constants(form: Form) -> list[Any]:
    """Return the values of a form that can be written as a list of constants, else an empty list."""
    if isinstance(form, Boolean) and len(form.values) == 1:
        return [*form.values]
    if isinstance(form, Number) and form.constants is not None:
        return list(form.constants) if all(abs(one) <= MAX_CONSTANT for one in form.constants) else []
    if isinstance(form, Text) and form.constants is not None and not form.patterns:
        return [*form.constants]
    return []


def number_schema(number: Number) -> dict[str, Any]:
    if number.constants is not None:
        large = [int(one) for one in number.constants if abs(one) > MAX_CONSTANT]
        options: list[dict[str, Any]] = [{"type": "integer", "minimum": one, "maximum": one} for one in large]
        small = [one for one in number.constants if abs(one) <= MAX_CONSTANT]
        options += [{"enum": small}] if small else []
        return {"anyOf": options}
    low, high = (
        "exclusiveMinimum" if number.is_above else "minimum",
        "exclusiveMaximum" if number.is_below else "maximum",
    )
    limits = {low: number.minimum, high: number.maximum, "multipleOf": number.multiple}
    kind = "integer" if number.is_integer else "number"
    return {"type": kind} | {key: value for key, value in limits.items() if value is not None}


def text_schema(text: Text) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if text.constants is not None:
        schema["enum"] = [*text.constants]
    if text.min_length:
        schema["minLength"] = text.min_length
    if text.max_length is not None:
        schema["maxLength"] = text.max_length
    if text.patterns:
        schema["pattern"] = _whole(text.patterns[0])
    more = [{"type": "string", "pattern": _whole(one)} for one in text.patterns[1:]]
    return schema | ({"allOf": more} if more else {})


def _name_pattern(names: Text) -> str:
    """Return the regular expression of the names of properties that are not declared."""
    if names.patterns:
        return _whole(names.patterns[0])
    most = "" if names.max_length is None else names.max_length
    return _whole(f"(?s:.{{{names.min_length},{most}}})")


def _whole(pattern: str) -> str:
    """Return an expression for whole texts in the syntax of schemas, whose expressions match parts of texts."""
    return f"^(?:{pattern})$"
