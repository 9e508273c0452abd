"""The opposite of a schema, as far as it can be expressed without `not`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.text.schemas.document import Node
from quire.text.schemas.keywords import NOT_ENUM, REFERENCES, TYPES
from quire.text.schemas.states import Parts

# Prefix of the keys of schemas that are made here.
OPPOSITE = "opposite"
MAX_DEPTH = 8
# Keyword -> the type of the values that it restricts, the opposite keyword, and the offset of the opposite's value.
LIMITS: Mapping[str, tuple[str, str, int]] = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}


def negated(schemas: Parts, node: Node, depth: int = 0) -> Node | None:
    """Return a schema that is met by exactly the values that do not meet `node`; None if it cannot be expressed."""
    if isinstance(node, bool):
        return not node
    if depth > MAX_DEPTH:
        return None
    options: list[Node] = []
    keywords = schemas.keywords(node)
    for keyword, value in keywords.items():
        opposite = _opposite(schemas, node, keyword, value, depth)
        if opposite is None:
            return None
        if opposite is not False:
            options.append(opposite)
    if not options:
        return False
    return options[0] if len(options) == 1 else schemas.make(node, OPPOSITE, {"anyOf": options})


def _opposite(schemas: Parts, node: Mapping[str, Any], keyword: str, value: Any, depth: int) -> Node | None:
    """Return the opposite of one keyword, the same schema object in each call; None if it cannot be expressed."""
    content: dict[str, Any] | None = None
    if keyword in LIMITS:
        kind, opposite, step = LIMITS[keyword]
        content = {"type": kind, opposite: value + step}
    elif keyword == "type":
        names = {value} if isinstance(value, str) else set(value)
        if "integer" in names and "number" not in names:
            return None  # no type has just the numbers that are not integers
        content = {"type": sorted(TYPES - names - {"integer"})}
    elif keyword in ("enum", "const"):
        constants = value if keyword == "enum" else [value]
        if any(isinstance(one, list | tuple | Mapping) for one in constants):
            return None
        content = {NOT_ENUM: list(constants)}
    elif keyword == "required":
        content = {"type": "object", "anyOf": [{"properties": {name: False}} for name in value]}
    elif keyword in REFERENCES:
        target = schemas.resolve(node, keyword)
        return None if target is None else negated(schemas, target, depth + 1)
    elif keyword == "not":
        return value if isinstance(value, Mapping | bool) else None
    elif keyword in ("properties", "allOf", "anyOf"):
        return _of_parts(schemas, node, keyword, value, depth)
    if content is None:
        return None
    return schemas.make(node, f"{OPPOSITE} of {keyword}", content)


def _of_parts(schemas: Parts, node: Mapping[str, Any], keyword: str, value: Any, depth: int) -> Node | None:
    parts = list(value.values() if keyword == "properties" else value)
    opposites = [negated(schemas, part, depth + 1) for part in parts]
    if any(one is None for one in opposites):
        return None
    if keyword == "properties":
        options = [
            {"type": "object", "required": [name], "properties": {name: one}}
            for name, one in zip(value, opposites, strict=True)
            if one is not False
        ]
        return schemas.make(node, f"{OPPOSITE} of properties", {"anyOf": options}) if options else False
    combined = "anyOf" if keyword == "allOf" else "allOf"
    return schemas.make(node, f"{OPPOSITE} of {keyword}", {combined: opposites}) if opposites else False
