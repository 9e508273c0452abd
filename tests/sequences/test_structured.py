"""Structured-output parameters: accepted values, and refused ones by name."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from quire.errors import InvalidParameter, UnsupportedFeature
from quire.sequences.params import SamplingParams
from quire.sequences.structured import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    GrammarSource,
    StructuredOutputs,
    structured_outputs,
)

SCHEMA = {"properties": {"b": {"type": "integer"}, "a": {"enum": ["é"]}}}


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def circular() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    return schema


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ({"json": SCHEMA}, GrammarSource("json", '{"properties": {"b": {"type": "integer"}, "a": {"enum": ["é"]}}}')),
        ({"json": '{ "b":1}'}, GrammarSource("json", '{ "b":1}')),
        ({"json": {}}, GrammarSource("json", "{}")),
        ({"json": {}, "disable_any_whitespace": True}, GrammarSource("json", "{}", False)),
        ({"json": True}, GrammarSource("json", "true")),
        ({"json": "{}", "disable_additional_properties": True}, GrammarSource("json", "{}", True, True)),
        ({"json": {}, "disable_fallback": True, "whitespace_pattern": None}, GrammarSource("json", "{}")),
        ({"json_object": True}, GrammarSource("json", '{"type": "object"}')),
        ({"json_object": True, "disable_any_whitespace": True}, GrammarSource("json", '{"type": "object"}', False)),
        ({"regex": "a+"}, GrammarSource("regex", "a+")),
        ({"choice": ["b", "a\n"]}, GrammarSource("choice", '["b", "a\\n"]')),
        ({"grammar": "start: x"}, GrammarSource("grammar", "start: x")),
    ],
)
def test_a_grammar_is_known_by_its_text(given: dict[str, Any], source: GrammarSource) -> None:
    wanted = StructuredOutputs(**given)
    assert wanted.source == source
    assert wanted == StructuredOutputs(**given)
    assert hash(wanted) == hash(StructuredOutputs(**given))
    assert pickle.loads(pickle.dumps(wanted)) == wanted
    params = SamplingParams(structured_outputs=given)  # type: ignore[arg-type]
    assert params.structured_outputs == wanted
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs"),
        ({"json": {}, "json_object": True}, "structured_outputs"),
        ({"json": False}, "structured_outputs"),
        ({"regex": "a", "disable_additional_properties": True}, "structured_outputs.disable_additional_properties"),
        ({"json": {}, "disable_additional_properties": 1}, "structured_outputs.disable_additional_properties"),
        ({"json": {}, "disable_fallback": "no"}, "structured_outputs.disable_fallback"),
        ({"json": []}, "structured_outputs.json"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": "[1]"}, "structured_outputs.json"),
        ({"json": ""}, "structured_outputs.json"),
        ({"json": "[" * 100_000}, "structured_outputs.json"),
        ({"json": deep(5000)}, "structured_outputs.json"),
        ({"json": circular()}, "structured_outputs.json"),
        ({"json": {"const": float("nan")}}, "structured_outputs.json"),
        ({"json": {"const": object()}}, "structured_outputs.json"),
        ({"json": {"const": "\ud800"}}, "structured_outputs.json"),
        ({"json": {"const": "x" * MAX_GRAMMAR_CHARS}}, "structured_outputs.json"),
        ({"json_object": 1}, "structured_outputs.json_object"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"regex": 1}, "structured_outputs.regex"),
        ({"regex": "\ud800"}, "structured_outputs.regex"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": "ab"}, "structured_outputs.choice"),
        ({"choice": ["a", ""]}, "structured_outputs.choice"),
        ({"choice": ["a", 1]}, "structured_outputs.choice"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "structured_outputs.choice"),
        ({"choice": ["a" * MAX_GRAMMAR_CHARS, "b"]}, "structured_outputs.choice"),
        ({"grammar": ""}, "structured_outputs.grammar"),
        ({"grammar": ["start: x"]}, "structured_outputs.grammar"),
        ({"regex": "a", "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace"),
        ({"json_object": True, "disable_any_whitespace": 1}, "structured_outputs.disable_any_whitespace"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        StructuredOutputs(**given)
    assert caught.value.field == field
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(structured_outputs=given)  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("given", ["a", 1, ["regex"], {"regexp": "a"}, {"regex": "a", "json_": None}])
def test_only_its_own_fields_make_structured_outputs(given: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(structured_outputs=given)
    assert caught.value.field == "structured_outputs"


def test_ending_by_grammar_excludes_options_past_the_end() -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), ignore_eos=True)
    assert caught.value.field == "ignore_eos"


@pytest.mark.parametrize("kind", ["json", "json_object", "regex", "choice", "grammar"])
def test_the_field_that_is_given_is_the_one_to_blame(kind: str) -> None:
    values: dict[str, Any] = {"json": {}, "json_object": True, "regex": "a", "choice": ["a"], "grammar": "start: x"}
    assert StructuredOutputs(**{kind: values[kind]}).field == f"structured_outputs.{kind}"


@pytest.mark.parametrize("name", ["whitespace_pattern", "structural_tag"])
def test_fields_of_vllm_that_are_not_supported_say_so(name: str) -> None:
    given: dict[str, Any] = {"json": {}, name: "x"}
    for make in (StructuredOutputs, lambda **fields: structured_outputs(fields)):
        with pytest.raises(UnsupportedFeature) as caught:
            make(**given)
        assert caught.value.field == f"structured_outputs.{name}"
