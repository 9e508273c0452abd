"""The keywords of one part of a JSON schema, checked, without keywords that restrict nothing.

Source: JSON Schema, draft 2020-12, validation vocabulary; the boolean `exclusiveMinimum`, `items` as a list with
`additionalItems`, and `dependencies` are from earlier drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from typing import Any

from quire.errors import shown
from quire.text.schemas.document import Node, SchemaError
from quire.text.schemas.formats import FORMATS, NOT_ENFORCED

TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Keywords of objects, arrays, strings and numbers that a value of another type always meets.
OF_OBJECTS = (
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "unevaluatedProperties"),
)
OF_ARRAYS = ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "unevaluatedItems")
IN_PLACE = (
    *(*REFERENCES, "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)
# Greatest limit of a count; no output has more characters, items or properties.
MAX_COUNT = 2**31 - 1
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minContains")

Check = tuple[Callable[[Any], bool], str]


def _is_schema(value: object) -> bool:
    return isinstance(value, Mapping | bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _is_names(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def _is_types(value: object) -> bool:
    names = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(name, str) and name in TYPES for name in names)


def _is_schema_list(value: object) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_schema, value))


def _is_map(value: object, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(map(is_right, value.values()))


def _is_finite(value: Any) -> bool:
    """Return whether all numbers in a value are finite."""
    left = [value]
    while left:
        one = left.pop()
        if type(one) is float and not math.isfinite(one):
            return False
        left += one.values() if isinstance(one, Mapping) else one if isinstance(one, list | tuple) else ()
    return True


SCHEMA: Check = (_is_schema, "a schema")
SCHEMA_LIST: Check = (lambda v: _is_schema_list(v) and bool(v), "a list of schemas that is not empty")
SCHEMA_MAP: Check = (lambda v: _is_map(v, _is_schema), "an object of schemas")
NUMBER: Check = (_is_number, "a number")
LIMIT: Check = (lambda v: isinstance(v, bool) or _is_number(v), "a number")
COUNT: Check = (_is_count, "an integer from 0 on")
NAMES: Check = (_is_names, "a list of strings")
CHECKS: dict[str, Check] = {
    "type": (_is_types, f"one of {', '.join(sorted(TYPES))}, or a list of them"),
    "enum": (lambda v: isinstance(v, list | tuple) and bool(v) and _is_finite(v), "a list that is not empty"),
    "const": (_is_finite, "a value that JSON can hold"),
    "required": NAMES,
    "pattern": (lambda v: isinstance(v, str), "a string"),
    "format": (lambda v: isinstance(v, str), "a string"),
    "uniqueItems": (lambda v: isinstance(v, bool), "true or false"),
    "multipleOf": (lambda v: _is_number(v) and v > 0, "a number above 0"),
    "minimum": NUMBER,
    "maximum": NUMBER,
    "exclusiveMinimum": LIMIT,
    "exclusiveMaximum": LIMIT,
    "items": (lambda v: _is_schema(v) or _is_schema_list(v), "a schema"),
    "dependentRequired": (lambda v: _is_map(v, _is_names), "an object of lists of strings"),
    "dependencies": (lambda v: _is_map(v, lambda one: _is_schema(one) or _is_names(one)), "an object of schemas"),
    "maxContains": COUNT,
    **dict.fromkeys(COUNTS, COUNT),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), SCHEMA_MAP),
    **dict.fromkeys(("anyOf", "oneOf"), SCHEMA_LIST),
    **dict.fromkeys(("prefixItems", "allOf"), (_is_schema_list, "a list of schemas")),
    **dict.fromkeys(("additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems"), SCHEMA),
    **dict.fromkeys(("contains", "additionalItems", "not", "if", "then", "else"), SCHEMA),
}
KNOWN = frozenset({*CHECKS, *REFERENCES})
# Keyword of schemas that are made as opposites: the value equals none of a list of scalars.
NOT_ENUM = "not enum"
RESTRICTING = KNOWN | {NOT_ENUM}


def read_keywords(node: Mapping[str, Any], place: str, unknown: Container[str] = ()) -> dict[str, Any]:
    """Return the keywords of a part that restrict values, in their order.

    Keywords with the value null are ignored, except `const`; unknown ones are annotations.

    Args:
        node: the part.
        place: its place, for errors.
        unknown: known keywords that count as unknown.

    Raises:
        SchemaError: a keyword has a value that it cannot have.
    """
    found: dict[str, Any] = {}
    for keyword, value in node.items():
        if keyword not in KNOWN or keyword in unknown or (value is None and keyword != "const"):
            continue
        is_right, allowed = CHECKS.get(keyword, (None, ""))
        if is_right is not None and not is_right(value):
            raise SchemaError(f"{place}{': ' if place else ''}{keyword} is {allowed}, got {shown(value)}")
        found[keyword] = int(value) if keyword in COUNTS or keyword == "maxContains" else value
    return _restricting(found)


def _restricting(found: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords in the form of draft 2020-12, without keywords that any value meets."""
    for keyword in ("minItems", "minLength", "minProperties"):
        if found.get(keyword) == 0:
            del found[keyword]
    if found.get("format") not in FORMATS.keys() | NOT_ENFORCED:
        found.pop("format", None)
    if not found.get("uniqueItems"):
        found.pop("uniqueItems", None)
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies", "properties", "patternProperties"):
        if keyword in found and not found[keyword] and keyword != "properties":
            del found[keyword]
    _modernise_items(found)
    _modernise_limits(found)
    least, most = found.pop("minContains", 1), found.pop("maxContains", None)
    if "contains" in found:
        if least == 0 and most is None:
            del found["contains"]
        else:
            found["contains"] = (found["contains"], least, most)
    if "if" not in found or ("then" not in found and "else" not in found):
        for keyword in ("if", "then", "else"):
            found.pop(keyword, None)
    return found


def _modernise_items(found: dict[str, Any]) -> None:
    further = found.pop("additionalItems", None)
    if isinstance(found.get("items"), list | tuple):
        found["prefixItems"] = found.pop("items")
        if further is not None:
            found["items"] = further
    if not found.get("prefixItems", True):
        del found["prefixItems"]


def _modernise_limits(found: dict[str, Any]) -> None:
    for keyword, own in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        value = found.get(keyword)
        if isinstance(value, bool):
            del found[keyword]
            if value and own in found:
                found[keyword] = found.pop(own)


def is_trivial(node: Node) -> bool:
    """Return whether a part has no keyword that restricts values."""
    return node is True or (isinstance(node, Mapping) and not (RESTRICTING & node.keys()))
