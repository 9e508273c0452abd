"""Objects get no further keys, unless a schema asks for them or combines the properties of several parts."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from quire.sequences.closed_schema import close_objects

ONE = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**ONE, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (ONE, CLOSED),
        ({"type": "object", "properties": {"in": ONE}}, {**CLOSED, "properties": {"in": CLOSED}}),
        ({"type": "array", "items": ONE}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [ONE, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$ref": "#/$defs/A", "$defs": {"A": ONE}}, {"$ref": "#/$defs/A", "$defs": {"A": CLOSED}}),
        ({"type": "object", "additionalProperties": ONE}, {"type": "object", "additionalProperties": CLOSED}),
    ],
)
def test_objects_with_properties_are_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    before = deepcopy(schema)
    assert close_objects(schema) == expected
    assert schema == before


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {**ONE, "additionalProperties": True},
        {**ONE, "additionalProperties": {"type": "string"}},
        {**ONE, "patternProperties": {"^x": {"type": "string"}}},
        {"allOf": [ONE, {"properties": {"b": {"type": "integer"}}}]},
        {**ONE, "anyOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]},
        {**ONE, "$ref": "#/$defs/A", "$defs": {"A": ONE}},
        {"items": {"allOf": [ONE, ONE]}, "properties": {"b": {"enum": [{"properties": {}}]}}},
    ],
)
def test_schemas_that_ask_for_keys_or_combine_parts_stay(schema: dict[str, Any]) -> None:
    assert close_objects(schema) == schema
