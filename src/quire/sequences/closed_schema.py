"""JSON schemas without further keys: a weak model that may add keys to an object never ends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Keys whose schemas describe the same value as the schema that has them.
COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "not", "dependentSchemas", "unevaluatedProperties"})
OPEN = frozenset({"additionalProperties", "patternProperties"})
MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
SCHEMAS = frozenset({"items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf"})


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have no other keys than their `properties`, unless the schema asks for them.

    An object with `additionalProperties` or `patternProperties`, or without `properties`, asks for them. A schema that
    combines the properties of several parts, as `allOf` does, is returned as it is: no part knows the keys of all.
    """
    return dict(schema) if any(map(_combines, _parts(schema))) else _closed(schema)


def _parts(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and all schemas in it."""
    left: list[Any] = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            yield part
            left += [one for key in MAPS_OF_SCHEMAS for one in _values(part.get(key))]
            left += [one for key in SCHEMAS for one in _as_list(part.get(key))]


def _combines(schema: Mapping[str, Any]) -> bool:
    combining = COMBINING & schema.keys()
    parts = schema.get("allOf")
    return len(combining) + ("properties" in schema) > 1 or (isinstance(parts, list) and len(parts) > 1)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in MAPS_OF_SCHEMAS and isinstance(value, Mapping):
            closed[key] = {name: _closed(inner) for name, inner in value.items()}
        else:
            closed[key] = _closed(value) if key in SCHEMAS else value
    if "properties" in schema and not OPEN & schema.keys():
        closed["additionalProperties"] = False
    return closed


def _values(value: object) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else []


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]
