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


def read_keywords(node: Mapping[str, Any], path: str, unknown: Container[str] = ()) -> dict[str, Any]:
    """Return the keywords of a part that restrict values, in their order.

    Keywords with the value null are ignored, except `const`; unknown ones are annotations.

    Args:
        node: the part.
        path: its path, for errors.
        unknown: known keywords that count as unknown.

    Raises:
        SchemaError: a keyword has a value that it cannot have.
    """
    keywords: dict[str, Any] = {}
    for keyword, value in node.items():
        if keyword not in KNOWN or keyword in unknown or (value is None and keyword != "const"):
            continue
        is_right, allowed = CHECKS.get(keyword, (None, ""))
        if is_right is not None and not is_right(value):
            raise SchemaError(f"{path}{': ' if path else ''}{keyword} is {allowed}, got {shown(value)}")
        keywords[keyword] = int(value) if keyword in COUNTS or keyword == "maxContains" else value
    return _restricting(keywords)


def _restricting(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords in the form of draft 2020-12, without keywords that any value meets."""
    for keyword in ("minItems", "minLength", "minProperties"):
        if keywords.get(keyword) == 0:
            del keywords[keyword]
    if keywords.get("format") not in FORMATS.keys() | NOT_ENFORCED:
        keywords.pop("format", None)
    if not keywords.get("uniqueItems"):
        keywords.pop("uniqueItems", None)
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies", "properties", "patternProperties"):
        if keyword in keywords and not keywords[keyword] and keyword != "properties":
            del keywords[keyword]
    _modernise_items(keywords)
    _modernise_limits(keywords)
    least, most = keywords.pop("minContains", 1), keywords.pop("maxContains", None)
    if "contains" in keywords:
        if least == 0 and most is None:
            del keywords["contains"]
        else:
            keywords["contains"] = (keywords["contains"], least, most)
    if "if" not in keywords or ("then" not in keywords and "else" not in keywords):
        for keyword in ("if", "then", "else"):
            keywords.pop(keyword, None)
    return keywords


def _modernise_items(keywords: dict[str, Any]) -> None:
    further = keywords.pop("additionalItems", None)
    if isinstance(keywords.get("items"), list | tuple):
        keywords["prefixItems"] = keywords.pop("items")
        if further is not None:
            keywords["items"] = further
    if not keywords.get("prefixItems", True):
        del keywords["prefixItems"]


def _modernise_limits(keywords: dict[str, Any]) -> None:
    for keyword, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        value = keywords.get(keyword)
        if isinstance(value, bool):
            del keywords[keyword]
            if value and inclusive in keywords:
                keywords[keyword] = keywords.pop(inclusive)


def is_trivial(node: Node) -> bool:
    """Return whether a part has no keyword that restricts values."""
    return node is True or (isinstance(node, Mapping) and not (RESTRICTING & node.keys()))
