"""A small validator of JSON schemas, independent of the libraries under test."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

TYPES = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}
KNOWN = {
    *("type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "enum", "const"),
    *("minimum", "maximum", "pattern", "minLength", "maxLength", "anyOf", "$ref", "$defs", "description"),
}


def fits(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> bool:
    """Tell whether a value satisfies a schema.

    Args:
        value: what JSON can hold.
        schema: of keywords in `KNOWN` only.
        root: what `$ref` points into; the schema itself at the top.
    """
    root = schema if root is None else root
    assert schema.keys() <= KNOWN, f"this check knows nothing of {schema.keys() - KNOWN}"
    if "$ref" in schema and not fits(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root):
        return False
    if "anyOf" in schema and not any(fits(value, option, root) for option in schema["anyOf"]):
        return False
    kinds = schema.get("type", list(TYPES))
    if not any(TYPES[kind](value) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return False
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        return False
    if isinstance(value, dict):
        return _object_fits(value, schema, root)
    if isinstance(value, list):
        is_long_enough = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return is_long_enough and all(fits(item, schema.get("items", {}), root) for item in value)
    if isinstance(value, str):
        is_long_enough = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return is_long_enough and re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    return True


def _object_fits(value: dict[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    for name, member in value.items():
        if name in properties:
            if not fits(member, properties[name], root):
                return False
        elif others is False or (isinstance(others, dict) and not fits(member, others, root)):
            return False
    return all(name in value for name in schema.get("required", ()))
