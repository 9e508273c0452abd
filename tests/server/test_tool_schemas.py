"""A schema that does not compile is a 400 that names the schema, as each protocol does, and shows what was sent."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server import test_anthropic_messages, test_ollama, test_responses
from tests.server.process import ServerProcess
from tests.server.tool_answers import ASK, CHAT, NOW, WEATHER, Serve, needs_grammars

pytestmark = needs_grammars


def schema_of(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": value}}


def tool(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "bad", "parameters": schema, **more}}


# A schema, whether the tool is strict, and what the message says.
BAD: list[tuple[dict[str, Any], bool, str]] = [
    (
        schema_of({"$ref": "#/definitions/zz"}),
        True,
        "properties.x: $ref cannot be enforced, since no part of the schema",
    ),
    (schema_of({"type": "foo"}), False, "properties.x: type is one of array, "),
    (schema_of({"$ref": "https://example.com/a"}), True, "names another document, 'https://example.com/a'"),
    (schema_of({"type": "array", "uniqueItems": True}), True, "properties.x: uniqueItems cannot be enforced"),
    (schema_of({"type": "string", "pattern": "(?=a)"}), True, "has a look-ahead"),
    (schema_of({"type": "object", "required": 5}), False, "properties.x: required is a list of strings, got 5"),
]
# Schemas that a tool may have unless it is strict.
LEFT_OUT = [schema for schema, is_strict, _ in BAD if is_strict]


def check(message: str, field: str, schema: dict[str, Any], reason: str) -> None:
    assert message.startswith(f"{field} must be a JSON schema that compiles: "), message
    assert reason in message
    assert message.endswith(f", got {schema!r}")
    assert "llguidance" not in message
    assert "x-guidance" not in message
    assert "args_" not in message


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(("schema", "is_strict", "reason"), BAD)
def test_a_chat_names_the_tool(
    hermes: ServerProcess, schema: dict[str, Any], is_strict: bool, reason: str, choice: str
) -> None:
    tools = [WEATHER, tool(schema, strict=is_strict), NOW]
    for more in ({}, {"stream": True}, {"response_format": {"type": "json_object"}}):
        response = hermes.post(CHAT, {**ASK, "tools": tools, "tool_choice": choice, **more})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("tools[1].function.parameters", "invalid_parameter")
        check(error["message"], error["param"], schema, reason)


def test_the_tool_is_named_by_its_place_among_all(hermes: ServerProcess) -> None:
    schema, _, reason = BAD[1]
    named = {"type": "function", "function": {"name": "bad"}}
    body = {**ASK, "tools": [NOW, WEATHER, tool(schema)], "tool_choice": named}
    error = hermes.post(CHAT, body).json()["error"]
    assert error["param"] == "tools[2].function.parameters"
    check(error["message"], error["param"], schema, reason)
    # A tool that may not be called has no grammar.
    assert hermes.post(CHAT, {**body, "tool_choice": {"type": "function", "function": {"name": "now"}}}).is_success


@pytest.mark.parametrize("schema", LEFT_OUT)
def test_a_tool_that_is_not_strict_takes_no_other_down(hermes: ServerProcess, schema: dict[str, Any]) -> None:
    for choice in ("auto", "required"):
        body = {**ASK, "tools": [WEATHER, tool(schema), NOW], "tool_choice": choice}
        response = hermes.post(CHAT, body)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["tool_calls"]
    assert "the schema of the tool bad is enforced without some keywords: " in hermes.log.read_text()


@pytest.mark.parametrize(("schema", "is_strict", "reason"), BAD)
def test_other_protocols_name_it_as_theirs(
    hermes: ServerProcess, schema: dict[str, Any], is_strict: bool, reason: str
) -> None:
    flat = {"name": "bad", "strict": is_strict}
    tools: list[Any] = [*test_anthropic_messages.TOOLS[:1], {**flat, "input_schema": schema}]
    error = hermes.post(test_anthropic_messages.MESSAGES, {**test_anthropic_messages.ASK, "tools": tools}).json()
    check(error["error"]["message"], "tools[1].input_schema", schema, reason)

    tools = [*test_responses.TOOLS[:1], {"type": "function", **flat, "parameters": schema}]
    error = hermes.post(test_responses.RESPONSES, {**test_responses.ASK, "tools": tools}).json()["error"]
    assert error["param"] == "tools[1].parameters"
    check(error["message"], error["param"], schema, reason)

    tools = [WEATHER, tool(schema, strict=is_strict)]
    error = hermes.post(test_ollama.CHAT, {**test_ollama.ASK, "tools": tools}).json()
    check(error["error"], "tools[1].function.parameters", schema, reason)


@pytest.mark.parametrize("has_tools", [False, True])
def test_the_schema_of_an_answer_is_named_beside_tools_too(hermes: ServerProcess, has_tools: bool) -> None:
    schema, _, reason = BAD[4]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {**ASK, "response_format": form, "tools": [WEATHER] if has_tools else []}
    error = hermes.post(CHAT, body).json()["error"]
    assert error["param"] == "response_format.json_schema.schema"
    assert error["message"].startswith(f"{error['param']} must be a JSON schema that compiles: properties.x: pattern ")
    assert f"{reason}, got " in error["message"]
    assert "guidance" not in error["message"]
    for regex in ("(?=a)", "a/(?=b)"):
        error = hermes.post(CHAT, {**body, "response_format": None, "guided_regex": regex}).json()["error"]
        assert error["param"] == "guided_regex"
        assert "a regular expression that compiles: " in error["message"]
        assert error["message"].endswith(f", got {regex!r}")
    # What resembles a rule of a function is none.
    error = hermes.post(CHAT, {**body, "response_format": None, "guided_regex": "a\nargs_99: ("}).json()["error"]
    assert error["code"] == "invalid_parameter"
    assert "%llguidance" not in error["message"]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["qwen3_xml", "gemma4", "lfm2"])
def test_formats_without_json_name_the_key_that_a_strict_tool_has(serve: Serve, form: str) -> None:
    schema, is_strict, _ = BAD[3]
    tools = [WEATHER, tool(schema, strict=is_strict)]
    error = serve(form).post(CHAT, {**ASK, "tools": tools}).json()["error"]
    assert error["param"] == "tools[1].function.parameters"
    check(error["message"], error["param"], schema, "properties.x: uniqueItems cannot be enforced")
    assert "smaller" not in error["message"]
    look_around, _, reason = BAD[4]
    error = serve(form).post(CHAT, {**ASK, "tools": [WEATHER, tool(look_around, strict=True)]}).json()["error"]
    assert error["param"] == "tools[1].function.parameters"
    check(error["message"], error["param"], look_around, reason)
    assert serve(form).post(CHAT, {**ASK, "tools": [WEATHER, tool(look_around)]}).is_success
