"""One pass over a schema: what it becomes, what it refuses, and what it leaves out."""

from __future__ import annotations

import random
import re
from contextlib import suppress
from copy import deepcopy
from typing import Any

import pytest

from quire.text.schemas.as_json import PLAIN_ESCAPES, as_json
from quire.text.schemas.document import SchemaError, UnenforceableSchema
from quire.text.schemas.keywords import KNOWN
from quire.text.schemas.normal import normalise

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**A, "additionalProperties": False}
# Names that no other name is spelled as.
OPEN = {"patternProperties": {"": True}, "additionalProperties": False}
TEXT: dict[str, Any] = {"type": "string"}


def plain(schema: Any, *, is_closed: bool = False, is_strict: bool = True) -> dict[str, Any]:
    return as_json(normalise(schema, is_closed=is_closed, is_strict=is_strict)).schema


def options(schema: Any, **more: Any) -> list[Any]:
    return list(plain(schema, **more).get("anyOf", []))


# ---- objects without further properties ----


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED),
        (
            {**A, "required": ["a", "unit"]},
            {**CLOSED, "properties": {**A["properties"], "unit": True}, "required": ["a", "unit"]},
        ),
        ({"type": "object", "properties": {"in": A}}, {**CLOSED, "properties": {"in": CLOSED}}),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, CLOSED),
        ({"type": "object", "additionalProperties": A}, {"type": "object", "additionalProperties": CLOSED}),
        (
            {"allOf": [A, {"type": "object", "properties": {"b": TEXT}}]},
            {"type": "object", "properties": {**A["properties"], "b": TEXT}, "additionalProperties": False},
        ),
        ({"type": "object"}, {"type": "object"}),
        ({**A, "required": ["a"], "minProperties": 2}, {**A, **OPEN, "required": ["a"], "minProperties": 2}),
        ({**A, "additionalProperties": True}, {**A, **OPEN}),
        ({**A, "patternProperties": {"^x": TEXT}}, {**A, "patternProperties": {"^(?:x(?s:.*))$": TEXT}}),
    ],
)
def test_objects_that_declare_properties_are_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    before = deepcopy(schema)
    assert plain(schema, is_closed=True) == expected
    assert schema == before


def test_open_objects_may_have_further_properties_of_one_spelling() -> None:
    assert plain(A) == {**A, **OPEN}
    typed = as_json(normalise({**A, "additionalProperties": TEXT}, is_closed=False, is_strict=True))
    assert (typed.schema, typed.layout) == ({**A, "additionalProperties": TEXT}, PLAIN_ESCAPES)
    assert as_json(normalise(CLOSED, is_closed=False, is_strict=True)).layout == {}


# ---- what restricts nothing ----


@pytest.mark.parametrize(
    "keywords",
    [
        {"uniqueItems": False},
        {"minItems": 0},
        {"minContains": 1},
        {"maxContains": 3},
        {"contains": {"type": "string"}, "minContains": 0},
        {"if": {"type": "array"}},
        {"then": False, "else": False},
        {"dependentRequired": {}, "dependencies": {}, "dependentSchemas": {}},
        {"propertyNames": {"type": "string"}},
        {"format": "password"},
        {"nullable": True, "x-vendor": [1], "title": None, "minimum": None, "deprecated": True},
        {"allOf": [], "anyOf": [{}, {"minItems": 5}], "not": False},
        {"additionalItems": {"type": "string"}},
        {"uniqueItems": True, "maxItems": 1.0},
        {"required": [], "properties": {}, "patternProperties": {}},
        {"minimum": 5, "maxLength": 3, "pattern": "^a", "multipleOf": 2},
    ],
)
def test_keywords_that_restrict_nothing_pass(keywords: dict[str, Any]) -> None:
    expected: dict[str, Any] = {"type": "array"}
    if "maxItems" in keywords:
        expected["maxItems"] = 1
    assert plain({"type": "array", **keywords}) == expected


def test_a_schema_may_be_true_and_may_not_be_false_or_anything_else() -> None:
    assert plain(True) == {}
    assert plain({}) == {}
    with pytest.raises(UnenforceableSchema, match="no value meets it"):
        plain(False)
    with pytest.raises(SchemaError, match="a schema is an object, true or false"):
        plain([])


# ---- neighbours are merged ----


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (
            {"type": "integer", "minimum": 3, "anyOf": [{"maximum": 5}, {"minimum": 20}]},
            {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 5}, {"type": "integer", "minimum": 20}]},
        ),
        ({"$ref": "#/$defs/n", "minimum": 5}, {"type": "integer", "minimum": 5, "maximum": 9}),
        ({"$ref": "#/$defs/l/anyOf/0"}, {"enum": ["kg"]}),
        ({"$ref": "#/$defs/my%20unit"}, {"enum": ["lb"]}),
        ({"$ref": "#/$defs/a~1b"}, {"type": "boolean"}),
        ({"$ref": "#unit"}, {"enum": ["lb"]}),
        ({"$ref": "https://x.y/other#in"}, {"type": "null"}),
        ({"enum": ["kg", "stone", 5, None], "type": "string", "maxLength": 2}, {"enum": ["kg"]}),
        ({"enum": [1, 2.5, True, 30], "type": "number", "maximum": 9}, {"enum": [1, 2.5]}),
        ({"const": 5, "enum": [4, 5]}, {"enum": [5]}),
        ({"const": 1, "enum": [True, 1.0]}, {"enum": [1.0]}),
        ({"type": "string", "allOf": [{"minLength": 2}, {"maxLength": 4}]}, {**TEXT, "minLength": 2, "maxLength": 4}),
        ({"type": ["string", "null"], "maxLength": 4}, {"anyOf": [{**TEXT, "maxLength": 4}, {"type": "null"}]}),
        (
            {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "additionalProperties": False,
             "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
            {"anyOf": [{"type": "object", "properties": {"a": TEXT, "b": TEXT}, "required": [name],
                        "additionalProperties": False} for name in "ab"]},
        ),
        (
            {"type": "array", "prefixItems": [TEXT], "items": {"type": "null"}, "allOf": [{"items": {"maxLength": 3}}]},
            {"type": "array", "prefixItems": [{**TEXT, "maxLength": 3}], "items": {"type": "null"}},
        ),
        ({"type": "integer", "exclusiveMinimum": 3, "maximum": 9.5}, {"type": "integer", "minimum": 4, "maximum": 9}),
        ({"type": "number", "minimum": 3, "exclusiveMinimum": True}, {"type": "number", "exclusiveMinimum": 3}),
        ({"type": "number", "allOf": [{"multipleOf": 4}, {"multipleOf": 6}]}, {"type": "number", "multipleOf": 12}),
    ],
)  # fmt: skip
def test_what_stands_beside_a_keyword_holds_too(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    definitions: dict[str, Any] = {
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
        "l": {"anyOf": [{"enum": ["kg"]}, {"type": "null"}]},
        "my unit": {"$anchor": "unit", "enum": ["lb"]},
        "a/b": {"type": "boolean"},
        "other": {"$id": "https://x.y/other", "$defs": {"z": {"$anchor": "in", "type": "null"}}},
    }
    inner = {"type": "object", "properties": {"v": schema}, "additionalProperties": False, "$defs": definitions}
    assert plain(inner)["properties"]["v"] == expected


def test_a_recursive_schema_has_a_definition_for_each_conjunction() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node", "required": ["next"]}}}
    found = plain({"$ref": "#/$defs/node", "$defs": {"node": {**node, "additionalProperties": False}}}, is_strict=False)
    # Each further node must have a next one, for ever, so that only the first is possible.
    assert found == {"type": "object", "properties": {"next": False}, "additionalProperties": False}
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    with pytest.raises(UnenforceableSchema, match="no value meets it"):
        plain(endless)
    tree = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"$ref": "#"}}},
        "additionalProperties": False,
    }
    ((name, definition),) = plain(tree)["$defs"].items()
    assert plain(tree)["$ref"] == f"#/$defs/{name}"
    assert definition["properties"]["a"]["items"] == {"$ref": f"#/$defs/{name}"}


def test_dependencies_conditions_and_opposites_become_alternatives() -> None:
    base = {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "additionalProperties": False}
    without, both = options({**base, "dependentRequired": {"a": ["b"]}})
    assert (without["properties"]["a"], without.get("required")) == (False, None)
    assert both["required"] == ["a", "b"]
    condition = {"properties": {"a": {"const": "x"}}, "required": ["a"]}
    taken, *others = options({**base, "if": condition, "then": {"required": ["b"]}})
    assert taken["properties"]["a"] == {"enum": ["x"]}
    assert taken["required"] == ["a", "b"]
    assert any(one["properties"]["a"] is False for one in others)
    assert plain({"not": {"type": ["string", "object", "array", "boolean"]}}) == {
        "anyOf": [{"type": "number"}, {"type": "null"}]
    }
    assert plain({"type": "integer", "not": {"const": 3}}) == {
        "anyOf": [{"type": "integer", "maximum": 2}, {"type": "integer", "minimum": 4}]
    }
    assert plain({"type": "object", "not": {"required": ["a"]}})["properties"] == {"a": False}
    # The opposite of constants is no schema that any value meets, wherever it stands.
    assert plain({"enum": ["x", "y"], "not": {"type": "string", "enum": ["x"]}}) == {"enum": ["y"]}
    inner = {"properties": {"a": {"not": {"enum": ["x"]}}}}
    assert plain({**base, "properties": {"a": {"enum": ["x", "y"]}}, "allOf": [inner]})["properties"] == {
        "a": {"enum": ["y"]}
    }
    no, yes = ({"properties": {"a": {"const": one}}, "required": ["a"]} for one in "xy")
    both = {**base, "properties": {"a": {"enum": ["x", "y"]}}, "if": no, "then": False, "required": ["a"]}
    assert plain(both)["properties"]["a"] == {"enum": ["y"]}
    either = {**base, "properties": {"a": {"enum": ["x", "y"]}}, "oneOf": [no, {"not": yes}], "required": ["a"]}
    with pytest.raises(SchemaError, match="no value meets it"):
        plain(either)


def test_one_of_excludes_the_other_branches() -> None:
    branches = [{"required": ["a"]}, {"required": ["b"]}]
    base = {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "additionalProperties": False, "oneOf": branches}
    first, second = options(base)
    assert (first["required"], first["properties"]["b"]) == (["a"], False)
    assert (second["required"], second["properties"]["a"]) == (["b"], False)
    kinds = [{"properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("x", "y")]
    assert len(options({"type": "object", "oneOf": kinds})) == 2
    assert plain({"oneOf": [TEXT, {"type": "null"}]}) == {"anyOf": [TEXT, {"type": "null"}]}
    overlapping = {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]}
    with pytest.raises(
        SchemaError, match=r"oneOf cannot be enforced, since a value may meet several .*; anyOf allows that"
    ):
        plain(overlapping)
    found = normalise(overlapping, is_closed=False, is_strict=False)
    assert [one.keyword for one in found.dropped] == ["oneOf"]


def test_properties_that_are_not_evaluated_are_known() -> None:
    parts = {
        "allOf": [
            {"properties": {"a": TEXT}},
            {"anyOf": [{"properties": {"b": TEXT}, "required": ["b"]}, {"maxProperties": 9}]},
        ]
    }
    first, second = options({"type": "object", **parts, "unevaluatedProperties": False})
    assert set(first["properties"]) == {"a", "b"}
    assert set(second["properties"]) == {"a"}
    assert first["additionalProperties"] is second["additionalProperties"] is False
    pair = {"type": "array", "prefixItems": [TEXT], "unevaluatedItems": False}
    assert plain(pair) == {"type": "array", "prefixItems": [TEXT], "items": False}


@pytest.mark.parametrize(
    ("limits", "sets"),
    [
        ({"minProperties": 1}, [({"a", "b", "c"}, {name}) for name in "abc"]),
        ({"maxProperties": 1}, [({name}, set()) for name in "abc"]),
        ({"minProperties": 2, "maxProperties": 2}, [({a, b}, {a, b}) for a, b in ("ab", "ac", "bc")]),
        ({"maxProperties": 3}, [({"a", "b", "c"}, set())]),
        ({"minProperties": 3.0}, [({"a", "b", "c"}, {"a", "b", "c"})]),
    ],
)
def test_numbers_of_declared_properties_are_sets_of_them(
    limits: dict[str, Any], sets: list[tuple[set[str], set[str]]]
) -> None:
    base = {"type": "object", "properties": dict.fromkeys("abc", TEXT), "additionalProperties": False}
    found = plain({**base, **limits})
    forms = found.get("anyOf", [found])
    seen = [
        ({name for name, inner in form["properties"].items() if inner is not False}, set(form.get("required", ())))
        for form in forms
    ]
    assert seen == sets


def test_a_number_of_properties_that_are_not_declared_is_at_least_one_or_refused() -> None:
    any_of = {"type": "object", "patternProperties": {"^[ab]$": {"enum": [1]}}, "additionalProperties": False}
    assert plain({**any_of, "minProperties": 1, "maxProperties": 5})["minProperties"] == 1
    with pytest.raises(SchemaError, match="minProperties cannot be enforced, since a grammar does not see a name that"):
        plain({**any_of, "minProperties": 2, "maxProperties": 2})
    # One that is required counts, since it has its place.
    assert plain({**A, "required": ["a"], "minProperties": 2})["minProperties"] == 2


# ---- what cannot be enforced ----


@pytest.mark.parametrize(
    ("part", "keyword", "reason"),
    [
        ({"type": "string", "pattern": "^(?!a)b"}, "pattern", "has a look-ahead"),
        ({"type": "string", "pattern": r"\bfox\b"}, "pattern", "has a word boundary"),
        ({"type": "string", "format": "uri-template"}, "format", "there is no expression of uri-template"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "does not compare items"),
        ({"type": "array", "contains": {"const": 1}}, "contains", "does not look for an item"),
        ({"$ref": "https://example.com/a"}, "$ref", "names another document"),
        ({"$ref": "#/nowhere"}, "$ref", "no part of the schema is"),
        ({"not": {"pattern": "a"}}, "not", "the opposite of its schema cannot be expressed"),
        ({"type": "integer", "minimum": 10**30}, "minimum", "more than 64 bits"),
        ({"const": 9007199254740993}, "const", "has too many digits"),
        ({"type": "number", "multipleOf": 1e-300}, "multipleOf", "has too many digits"),
        ({"type": "object", "patternProperties": {"^(?=a)": {}}}, "patternProperties", "has a look-ahead"),
        ({"type": "object", "patternProperties": {"^a": {}, "b$": {}}}, "patternProperties", "match several"),
        ({**A, "propertyNames": {"pattern": "^a"}}, "propertyNames", "only lists of names"),
    ],
)
def test_a_keyword_that_cannot_be_enforced_is_refused_or_left_out(
    part: dict[str, Any], keyword: str, reason: str
) -> None:
    schema = {"type": "object", "properties": {"v": part, "w": TEXT}, "additionalProperties": False}
    with pytest.raises(SchemaError, match=rf"^properties\.v: {re.escape(keyword)} cannot be enforced, since"):
        plain(schema)
    found = normalise(schema, is_closed=True, is_strict=False)
    ((place, name, why),) = found.dropped
    assert (place, name) == ("properties.v", keyword)
    assert reason in why
    kept = as_json(found).schema
    assert kept["properties"]["w"] == TEXT
    assert "type" not in part or part["type"] == kept["properties"]["v"]["type"]


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "int"}, r"properties\.v: type is one of array, .*, got 'int'"),
        ({"required": True}, r"properties\.v: required is a list of strings, got True"),
        ({"minLength": -1}, "minLength is an integer from 0 on"),
        ({"maxItems": 1.5}, "maxItems is an integer from 0 on"),
        ({"enum": []}, "enum is a list that is not empty"),
        ({"anyOf": []}, "anyOf is a list of schemas that is not empty"),
        ({"properties": [1]}, "properties is an object of schemas"),
        ({"minimum": float("inf")}, "minimum is a number, got inf"),
        ({"const": float("nan")}, "const is a value that JSON can hold"),
        ({"multipleOf": 0}, "multipleOf is a number above 0"),
        ({"pattern": 5}, "pattern is a string"),
    ],
)
@pytest.mark.parametrize("is_strict", [True, False])
def test_what_is_no_schema_is_refused(part: dict[str, Any], reason: str, is_strict: bool) -> None:
    with pytest.raises(SchemaError, match=reason):
        plain({"properties": {"v": part}}, is_strict=is_strict)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{idx}": TEXT for idx in range(130)},
         "allOf": [{"anyOf": [{"required": [f"p{idx}"]}, {"required": [f"p{idx + 1}"]}]} for idx in range(9)]},
        {"allOf": [{"anyOf": [{"minimum": one} for one in range(12)]} for _ in range(3)]},
    ],
)  # fmt: skip
def test_combinations_without_end_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match="combinations of"):
        plain(schema)


def test_any_json_is_a_schema_or_refused() -> None:
    """Nothing but a `SchemaError` comes of what a client may send."""
    rng = random.Random(7)
    words = [*sorted(KNOWN), "$defs", "$id", "$anchor", "$dynamicAnchor", "then", "x"]
    values: list[Any] = [None, True, False, 0, -1, 2.5, 1e300, float("nan"), 10**400, "", "#", "#/$defs/a", "integer"]
    values += ["object", ["a"], [], {}, ["string", "null"], "^a", "(", 2**63, -(2**63), {"$defs": {"a": {"$ref": "#"}}}]

    def value(depth: int) -> Any:
        kind = rng.random()
        if depth > 4 or kind < 0.4:
            return rng.choice(values)
        if kind < 0.6:
            return [value(depth + 1) for _ in range(rng.randrange(3))]
        return {rng.choice(words): value(depth + 1) for _ in range(rng.randrange(4))}

    num_taken = 0
    for _ in range(3000):
        schema = {rng.choice(words): value(0) for _ in range(rng.randrange(1, 4))}
        with suppress(SchemaError):
            plain(schema, is_closed=rng.random() < 0.5, is_strict=rng.random() < 0.5)
            num_taken += 1
    assert num_taken > 300


@pytest.mark.parametrize("draft", ["draft-04", "draft-07", "draft/2019-09", "draft/2020-12"])
def test_keywords_of_a_later_draft_do_not_allow_more(draft: str) -> None:
    named = {"$schema": f"https://json-schema.org/{draft}/schema"}
    optional = {**named, "type": "array", "contains": True, "minContains": 0}
    if "20" in draft:
        assert plain(optional) == {"type": "array"}
    else:
        with pytest.raises(SchemaError, match="contains cannot be enforced"):
            plain(optional)
    first = {**named, "type": "array", "prefixItems": [{"type": "null"}], "items": TEXT}
    items = {"prefixItems": [{"type": "null"}]} if "2020" in draft else {}
    assert plain(first) == {"type": "array", **items, "items": TEXT}
