"""Names of JSON types, and the conversion of a plain text to JSON of an allowed type."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping

from quire.text.tool_calls.calls import JSON_SPACE, refuse_constant

# Python's words, which templates write for values that are not strings -> JSON's words.
WORDS: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}


def type_of(value: object) -> str:
    """Return the name of a value's JSON type."""
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}
    return names.get(type(value), "object")


def typed_json(text: str, kinds: Container[str]) -> str:
    """Return the JSON of a value that was written as plain text: a string unless it has another allowed type."""
    written = text.strip(JSON_SPACE)
    written = WORDS.get(written, written)
    try:
        kind = type_of(json.loads(written, parse_constant=refuse_constant))
    except (ValueError, RecursionError):
        kind = "string"
    if kind != "string" and (kind in kinds or (kind == "integer" and "number" in kinds)):
        return written
    return json.dumps(text, ensure_ascii=False)
