"""Forms of structured outputs that tests ask for, and checks of texts that need no grammar."""

from __future__ import annotations

import json
import re
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["fox", "owl"]},
        "friends": {"type": "array", "items": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"}, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"is_far": {"type": "boolean"}},
            "required": ["is_far"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "kind", "friends", "home"],
    "additionalProperties": False,
}
REGEX = r"The (cow|horse) said: [a-z ]{1,20}(!|\?)"
CHOICES = ["yes", "no", "not at all", "maybe"]
LARK = 'start: line{2,3}\nline: WORD " = " NUMBER ";"\nWORD: /[a-z]{1,8}/\nNUMBER: /[0-9]{1,3}/'


def meets(schema: dict[str, Any], value: Any) -> bool:
    """Check a value against the few words of JSON schema that are used here."""
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "object":
        known = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value)
            and (schema.get("additionalProperties", True) or set(value) <= set(known))
            and all(meets(known[name], inner) for name, inner in value.items() if name in known)
        )
    if schema["type"] == "array":
        is_short = isinstance(value, list) and len(value) <= schema["maxItems"]
        return is_short and all(meets(schema["items"], one) for one in value)
    if schema["type"] == "string":
        pattern = schema.get("pattern", "")
        return isinstance(value, str) and len(value) <= schema.get("maxLength", 99) and bool(re.search(pattern, value))
    if schema["type"] == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    return type(value) is bool


def is_right(kind: str, text: str) -> bool:
    """Check a text against one of `WANTED`, without a grammar."""
    if kind in ("json", "compact"):
        value = json.loads(text)
        around = re.sub(r'"(\\.|[^"\\])*"', "", text)
        return meets(SCHEMA, value) and (kind == "json" or not re.search(r"\s", around))
    if kind == "object":
        return isinstance(json.loads(text), dict)
    patterns = {"regex": REGEX, "choice": "|".join(CHOICES), "grammar": r"([a-z]{1,8} = [0-9]{1,3};){2,3}"}
    return re.fullmatch(patterns[kind], text) is not None


WANTED: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "compact": {"json": SCHEMA, "disable_any_whitespace": True},
    "object": {"json_object": True},
    "regex": {"regex": REGEX},
    "choice": {"choice": CHOICES},
    "grammar": {"grammar": LARK},
}
