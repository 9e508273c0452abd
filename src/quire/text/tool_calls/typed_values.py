"""Types that a JSON schema allows, and the conversion of a text to a value of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.text.tool_calls.calls import JSON_SPACE, refuse_constant

Schema = Mapping[str, Any]

TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
# JSON's words, and Python's, which templates write for values that are not strings.
WORDS: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}
MAX_REFS = 16


def resolve(schema: object, root: Schema) -> Schema:
    """Return a schema after its references.

    Args:
        schema: schema, or part of one; anything else than an object allows every value.
        root: schema that has the definitions.
    """
    for _ in range(MAX_REFS):
        if not isinstance(schema, Mapping):
            return {}
        path = schema.get("$ref")
        if not isinstance(path, str):
            return schema
        schema = root if path.startswith("#") else {}
        for name in path.lstrip("#").split("/")[1:]:
            key = name.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return {}


def types_of(schema: object, root: Schema, depth: int = 0) -> frozenset[str]:
    """Return the names of the JSON types that a schema allows; all of them where it names none.

    Args:
        schema: schema, or part of one.
        root: schema that has the definitions.
        depth: number of schemas around this one.
    """
    schema = resolve(schema, root)
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset({kinds})
    if isinstance(kinds, list):
        return frozenset(kind for kind in kinds if isinstance(kind, str))
    if "const" in schema:
        return frozenset({type_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(type_of, schema["enum"]))
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        if isinstance(parts, list) and parts and depth < MAX_REFS:
            allowed = [types_of(part, root, depth + 1) for part in parts]
            return frozenset.intersection(*allowed) if key == "allOf" else frozenset.union(*allowed)
    return TYPES


def type_of(value: object) -> str:
    """Return the name of a value's JSON type."""
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}
    return names.get(type(value), "object")


def typed_json(text: str, schema: object, root: Schema) -> str:
    """Return the JSON of a value that was written as plain text.

    Args:
        text: the text.
        schema: schema of the value.
        root: schema that has the definitions.

    Returns:
        JSON of a type that the schema allows, where the text can be one; else a string.
    """
    kinds = types_of(schema, root)
    if kinds != {"string"}:
        written = text.strip(JSON_SPACE)
        written = WORDS.get(written, written)
        try:
            kind = type_of(json.loads(written, parse_constant=refuse_constant))
        except (ValueError, RecursionError):
            kind = "string"
        if kind != "string" and (kind in kinds or (kind == "integer" and "number" in kinds)):
            return written
    return json.dumps(text, ensure_ascii=False)
