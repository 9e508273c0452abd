"""The forms of a conjunction of parts without applicators: for each type, the restrictions of all parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.text.schemas.document import Node, SchemaError
from quire.text.schemas.expansion import SchemaPart, count_limits
from quire.text.schemas.formats import FORMATS
from quire.text.schemas.forms import Anything, Array, Boolean, Form, Null, Number, Object, Text
from quire.text.schemas.keywords import MAX_COUNT, NOT_ENUM, OF_ARRAYS
from quire.text.schemas.numeric import common_multiple, enforceable
from quire.text.schemas.object_merging import objects
from quire.text.schemas.patterns import other_than, to_rust
from quire.text.schemas.states import States

# Values of `enum` and `const` by `_key`.
Constants = Mapping[tuple[bool, Any], Any]
LIMIT_KEYS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
EVERY: frozenset[Form] = frozenset({Null(), Boolean(), Number(), Text(), Array(), Object()})
BASIC_TYPES = ("string", "number", "boolean", "null", "array", "object")


def merge(parts: Sequence[SchemaPart], states: States) -> list[Form]:
    """Return the forms of values that meet all parts."""
    if not parts:
        return [Anything()]
    # Keys are needed since 1 and true are equal in Python.
    excluded = {_key(one): one for part in parts for one in part.keywords.get(NOT_ENUM, ())}
    constants = _constants(parts, excluded)
    makers: dict[str, Callable[[], list[Form]]] = {
        "null": lambda: [Null()] if _allows(None, constants, excluded) else [],
        "boolean": lambda: _booleans(constants, excluded),
        "number": lambda: _numbers(parts, constants, excluded, states, is_integer=False),
        "integer": lambda: _numbers(parts, constants, excluded, states, is_integer=True),
        "string": lambda: _texts(parts, constants, excluded, states),
        "array": lambda: [] if constants is not None else _arrays(parts, states),
        "object": lambda: [] if constants is not None else [*objects(parts, states)],
    }
    forms = [form for kind in _types(parts) for form in makers[kind]()]
    return [Anything()] if set(forms) >= EVERY else forms


def _types(parts: Sequence[SchemaPart]) -> list[str]:
    """Return the types that all parts allow."""
    types = [*BASIC_TYPES]
    for part in parts:
        allowed = part.keywords.get("type")
        if allowed is None:
            continue
        names = {allowed} if isinstance(allowed, str) else set(allowed)
        if "number" in names:
            names.add("integer")
        elif "integer" in names:
            types = ["integer" if kind == "number" else kind for kind in types]
        types = [kind for kind in types if kind in names]
    return types


def _key(value: Any) -> tuple[bool, Any]:
    return type(value) is bool, value


def _constants(parts: Sequence[SchemaPart], excluded: Constants) -> Constants | None:
    """Return the constants that all parts allow; None if no part lists constants."""
    lists = [{_key(one): one for one in part.keywords["enum"]} for part in parts if "enum" in part.keywords]
    if not lists:
        return None
    return {
        key: one
        for key, one in lists[0].items()
        if key not in excluded and all(key in constants for constants in lists)
    }


def _allows(value: Any, constants: Constants | None, excluded: Constants) -> bool:
    return _key(value) in constants if constants is not None else _key(value) not in excluded


def _booleans(constants: Constants | None, excluded: Constants) -> list[Form]:
    values = tuple(value for value in (True, False) if _allows(value, constants, excluded))
    return [Boolean(values)] if values else []


def _numbers(
    parts: Sequence[SchemaPart], constants: Constants | None, excluded: Constants, states: States, *, is_integer: bool
) -> list[Form]:
    """Return the forms of a number: a range, or several around excluded numbers; none if no number is allowed."""
    numbers = [
        one for one in (constants or excluded).values() if isinstance(one, int | float) and type(one) is not bool
    ]
    if constants is not None and not numbers:
        return []
    number = Number(is_integer, constants=None if constants is None else tuple(numbers))
    for part in parts:
        number = _limited(number, part.keywords)
    multiples = [part for part in parts if "multipleOf" in part.keywords]
    try:
        number = replace(number, multiple=common_multiple([part.keywords["multipleOf"] for part in multiples]))
    except SchemaError as error:
        states.drop(multiples[0].node, "multipleOf", str(error))
    ranges = [number]
    for other in sorted(numbers) if constants is None else ():
        above = _limited(ranges[-1], {"exclusiveMinimum": other})
        ranges[-1:] = [_limited(ranges[-1], {"exclusiveMaximum": other}), above]
    try:
        return [exact for one in ranges if (exact := enforceable(one)) is not None]
    except SchemaError as error:
        keys = {*LIMIT_KEYS, "enum", NOT_ENUM}
        part, keyword = next((part, key) for part in parts for key in part.keywords if key in keys)
        is_constant = keyword == "enum" and isinstance(part.node, Mapping) and "const" in part.node
        states.drop(part.node, "const" if is_constant else keyword.removesuffix(" enum"), str(error))
        return [Number(is_integer)]


def _limited(number: Number, keywords: Mapping[str, Any]) -> Number:
    """Return a number within further limits."""
    low, high, is_above, is_below = number.minimum, number.maximum, number.is_above, number.is_below
    for keyword, is_open in (("minimum", False), ("exclusiveMinimum", True)):
        limit = keywords.get(keyword)
        if limit is not None and (low is None or (limit, is_open) > (low, is_above)):
            low, is_above = limit, is_open
    for keyword, is_open in (("maximum", False), ("exclusiveMaximum", True)):
        limit = keywords.get(keyword)
        if limit is not None and (high is None or (-limit, is_open) > (-high, is_below)):
            high, is_below = limit, is_open
    return replace(number, minimum=low, maximum=high, is_above=is_above, is_below=is_below)


def _texts(parts: Sequence[SchemaPart], constants: Constants | None, excluded: Constants, states: States) -> list[Form]:
    """Return the form of a string; none if no string is allowed."""
    min_length, max_length = count_limits(parts, "minLength", "maxLength")
    patterns: dict[str, None] = {}
    for part in parts:
        if "pattern" in part.keywords:
            try:
                patterns[to_rust(part.keywords["pattern"])] = None
            except SchemaError as error:
                states.drop(part.node, "pattern", str(error))
        name = part.keywords.get("format")
        if name is not None and name in FORMATS:
            patterns[FORMATS[name]] = None
        elif name is not None:
            states.drop(part.node, "format", f"there is no expression of {name}")
    if constants is not None:
        fitting = (one for one in constants.values() if isinstance(one, str) and len(one) >= min_length)
        texts = tuple(one for one in fitting if max_length is None or len(one) <= max_length)
        return [Text(0, None, tuple(patterns), texts)] if texts else []
    if min_length > (MAX_COUNT if max_length is None else max_length):
        return []
    others = [one for one in excluded.values() if isinstance(one, str)]
    if others:
        try:
            patterns[other_than(others)] = None
        except SchemaError as error:
            states.drop(parts[0].node, "not", str(error))
    return [Text(min_length, max_length, tuple(patterns))]


def _arrays(parts: Sequence[SchemaPart], states: States) -> list[Form]:
    """Return the form of an array; none if no array is allowed."""
    array_parts = [part for part in parts if part.keywords.keys() & {*OF_ARRAYS}]
    array_parts = [*array_parts, *_unevaluated_items(array_parts, states)]
    length = max((len(part.keywords.get("prefixItems", ())) for part in array_parts), default=0)
    prefix = tuple(states.state([*_nodes_at(array_parts, idx)]) for idx in range(length))
    items = states.state([part.keywords["items"] for part in array_parts if "items" in part.keywords])
    min_items, max_items = count_limits(array_parts, "minItems", "maxItems")
    for part in array_parts:
        if "contains" in part.keywords:
            states.drop(part.node, "contains", "a grammar does not look for an item")
        if "uniqueItems" in part.keywords and (max_items is None or max_items > 1):
            states.drop(part.node, "uniqueItems", "a grammar does not compare items")
    if min_items > (MAX_COUNT if max_items is None else max_items):
        return []
    return [Array(prefix, items, min_items, max_items)]


def _nodes_at(parts: Sequence[SchemaPart], idx: int) -> Iterator[Node]:
    """Yield the schemas of the item at an index."""
    for part in parts:
        prefix = part.keywords.get("prefixItems", ())
        if idx < len(prefix):
            yield prefix[idx]
        elif "items" in part.keywords:
            yield part.keywords["items"]


def _unevaluated_items(parts: Sequence[SchemaPart], states: States) -> Iterator[SchemaPart]:
    """Yield a part for each `unevaluatedItems`, which applies to items that no part of the same schema evaluates."""
    for part in parts:
        if "unevaluatedItems" not in part.keywords:
            continue
        inner = [other for other in parts if id(part.node) in other.owners]
        if any("contains" in other.keywords for other in inner):
            states.drop(part.node, "unevaluatedItems", "a grammar does not look for an item")
        elif not any("items" in other.keywords for other in inner):
            length = max(len(other.keywords.get("prefixItems", ())) for other in inner)
            keywords = {"prefixItems": [True] * length, "items": part.keywords["unevaluatedItems"]}
            yield SchemaPart(keywords, part.node, part.owners)
