"""Anthropic's messages: whole answers, streams, tools, counts of tokens, and errors in its own form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.process import ServerProcess
from tests.server.streams import named_events
from tests.server.test_disconnects import num_aborted, send
from tests.server.tool_answers import CHAT, CITY, PARIS, needs_grammars

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = [{"role": "user", "content": "hi"}]
PLAIN: dict[str, Any] = {"messages": USER, "max_tokens": 20, "temperature": 0}
TOOLS: list[dict[str, Any]] = [
    {"name": "get_weather", "description": "Looks.", "input_schema": CITY},
    {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]
ASK: dict[str, Any] = {"messages": USER, "max_tokens": 200, "temperature": 0, "tools": TOOLS}


def ask(server: ServerProcess, **more: Any) -> dict[str, Any]:
    response = server.post(MESSAGES, {**ASK, **more})
    assert response.status_code == 200, response.text
    return dict(response.json())


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of a stream's events, in which each block is opened and closed once."""
    message = dict(events[0]["message"])
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    is_open = False
    for event in events[1:-2]:
        kind = event["type"]
        assert is_open == (kind != "content_block_start")
        is_open = kind != "content_block_stop"
        if kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(dict(event["content_block"]) | {"json": ""})
            continue
        block = message["content"][event["index"]]
        if kind == "content_block_delta" and event["delta"]["type"] == "text_delta":
            block["text"] += event["delta"]["text"]
        elif kind == "content_block_delta":
            block["json"] += event["delta"]["partial_json"]
    assert not is_open
    for block in message["content"]:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "content": blocks, "id": None, "usage": message["usage"]["output_tokens"]}


def test_an_answer_is_that_of_the_chat(server: ServerProcess) -> None:
    system = [
        {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."},
    ]
    chat = {**PLAIN, "messages": [{"role": "system", "content": "Be brief."}, *USER]}
    choice = server.post(CHAT, chat).json()["choices"][0]
    message = server.post(MESSAGES, {**PLAIN, "system": system}).json()
    assert message["content"] == [{"type": "text", "text": choice["message"]["content"]}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny")
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    usage = message["usage"]
    assert usage["output_tokens"] == 20
    # All tokens but the last are in the cache since the chat.
    assert (usage["input_tokens"], usage["cache_creation_input_tokens"]) == (1, 0)
    count = server.post(COUNT, {"messages": USER, "system": system}).json()
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_a_stream_makes_the_same_message(server: ServerProcess) -> None:
    whole = server.post(MESSAGES, PLAIN).json()
    assert without_ids(joined(named_events(server, MESSAGES, PLAIN))) == without_ids(whole)


def test_a_stop_sequence_is_named(server: ServerProcess) -> None:
    for message in (
        server.post(MESSAGES, {**PLAIN, "stop_sequences": ["def"]}).json(),
        joined(named_events(server, MESSAGES, {**PLAIN, "stop_sequences": ["def"]})),
    ):
        assert message["content"] == [{"type": "text", "text": "abc"}]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "def")


def test_calls_are_blocks_and_their_results_go_back(hermes: ServerProcess) -> None:
    message = ask(hermes)
    text, call = message["content"]
    assert text == {"type": "text", "text": "I look."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", json.loads(PARIS))
    assert message["stop_reason"] == "tool_use"
    assert without_ids(joined(named_events(hermes, MESSAGES, ASK))) == without_ids(message)
    assert hermes.post(COUNT, {"messages": USER, "tools": TOOLS}).json() == {
        "input_tokens": message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
    }

    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "rain"}]}
    more = {"type": "text", "text": "And?"}
    turns = [*USER, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result, more]}]
    called = {"id": call["id"], "type": "function", "function": {"name": "get_weather", "arguments": PARIS}}
    chat = [
        *USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
        {"role": "user", "content": "And?"},
    ]
    ids = hermes.post("/tokenize", {"messages": chat}).json()["tokens"]
    assert hermes.post(COUNT, {"messages": turns}).json() == {"input_tokens": len(ids)}
    usage = hermes.post(CHAT, {"messages": chat, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == len(ids)
    # The whole prompt of the chat is found in the cache, so the two prompts have the same tokens.
    assert hermes.post(MESSAGES, {"messages": turns, "max_tokens": 1}).json()["usage"]["input_tokens"] == 1


def test_without_calls_tools_are_not_in_the_prompt(hermes: ServerProcess) -> None:
    message = ask(hermes, tool_choice={"type": "none"})
    assert [block["type"] for block in message["content"]] == ["text"]
    assert message["stop_reason"] == "end_turn"
    plain = hermes.post(COUNT, {"messages": USER}).json()
    assert hermes.post(COUNT, {"messages": USER, "tools": TOOLS, "tool_choice": {"type": "none"}}).json() == plain


@needs_grammars
@pytest.mark.parametrize(
    ("choice", "name"), [({"type": "any"}, "get_weather"), ({"type": "tool", "name": "now"}, "now")]
)
def test_a_call_can_be_required(hermes: ServerProcess, choice: dict[str, Any], name: str) -> None:
    message = ask(hermes, tool_choice={**choice, "disable_parallel_tool_use": True})
    assert [(block["type"], block["name"]) for block in message["content"]] == [("tool_use", name)]
    assert message["stop_reason"] == "tool_use"


def test_thinking_is_a_wish_that_a_template_may_know(hermes: ServerProcess, server: ServerProcess) -> None:
    kinds = (None, {"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"})
    with_switch, without = (
        [each.post(COUNT, {"messages": USER, "thinking": kind}).json()["input_tokens"] for kind in kinds]
        for each in (hermes, server)
    )
    assert [count - with_switch[0] for count in with_switch] == [0, len("no"), len("think"), len("think")]
    assert len(set(without)) == 1


@needs_grammars
def test_a_call_that_is_cut_off_is_left_out(hermes: ServerProcess) -> None:
    reasons = set()
    for max_tokens in range(10, 50, 4):
        message = ask(hermes, max_tokens=max_tokens)
        reasons.add(message["stop_reason"])
        inputs = [block["input"] for block in message["content"] if block["type"] == "tool_use"]
        assert inputs in ([], [json.loads(PARIS)])
    assert "max_tokens" in reasons


@needs_grammars
def test_an_output_has_the_form_of_its_schema(server: ServerProcess) -> None:
    form = {"type": "json_schema", "schema": {"enum": ["a"]}}
    message = server.post(MESSAGES, {**PLAIN, "output_config": {"format": form}}).json()
    assert (message["content"], message["stop_reason"]) == ([{"type": "text", "text": '"a"'}], "end_turn")


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "0"}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": USER * 4097}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [*USER, {"role": "assistant", "content": "I"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (block(), "messages[0].content[0].type"),
        (block(type="text"), "messages[0].content[0].text"),
        (block(type="image", source={"type": "url", "url": "http://a"}), "messages[0].content[0].type"),
        (block(type="image", source={}), "messages[0].content[0].source.type"),
        (block(type="tool_use", id="a", name="f", input={}), "messages[0].content[0].type"),
        (block(type="tool_result", tool_use_id="a", content=1), "messages[0].content[0].content"),
        (block(type="tool_result", content="rain"), "messages[0].content[0].tool_use_id"),
        ({"system": 1}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
        ({"tools": [{"name": "f", "input_schema": {"properties": True}}]}, "tools[0].input_schema.properties"),
        ({"tools": [{"name": "f", "input_schema": {"required": 5}}]}, "tools[0].input_schema.required"),
        ({"tools": [*TOOLS, {"name": "a b", "input_schema": {}}]}, "tools[2].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
        ({"thinking": {"type": True}}, "thinking.type"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"container": "c"}, "container"),
        ({"priority": 1}, "priority"),
    ],
)
def test_bad_input_is_an_error_in_anthropics_form(hermes: ServerProcess, body: dict[str, Any], field: str) -> None:
    for more in ({}, {"stream": True}):
        response = hermes.post(MESSAGES, {**PLAIN, **body, **more})
        assert response.status_code == 400, response.text
        error = response.json()
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        assert error["error"]["message"].startswith(f"{field} ")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", MESSAGES, {**PLAIN, "model": "other"}, 404, "not_found_error"),
        ("POST", "/v1/messages/batches", {}, 404, "not_found_error"),
        ("GET", MESSAGES, None, 405, "invalid_request_error"),
        ("POST", MESSAGES, "x" * (1 << 21), 413, "request_too_large"),
    ],
)
def test_every_status_has_anthropics_form(
    server: ServerProcess, method: str, path: str, body: Any, status: int, kind: str
) -> None:
    response = server.http.request(method, path, json=body)
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)


def test_a_key_may_come_in_anthropics_header(narrow_server: ServerProcess) -> None:
    key = {"x-api-key": narrow_server.http.headers["authorization"].removeprefix("Bearer ")}
    for headers, status in ((key, 200), ({"x-api-key": "wrong"}, 401), ({}, 401)):
        headers = {"authorization": "", **headers}
        response = narrow_server.http.post(COUNT, json={"messages": USER}, headers=headers)
        assert response.status_code == status, response.text
    assert response.json()["error"]["type"] == "authentication_error"


def test_silence_is_broken_by_pings_and_a_client_that_leaves_ends_its_request(narrow_server: ServerProcess) -> None:
    before = num_aborted(narrow_server)
    long = {**PLAIN, "max_tokens": 4000, "stream": True}
    with send(narrow_server, MESSAGES, long):
        narrow_server.wait_until(lambda status: status["requests"] and status["requests"][0]["completion_tokens"] > 3)
        # One sequence runs at a time, so this one waits.
        with send(narrow_server, MESSAGES, long) as waiting:
            raw = b""
            while raw.count(b'event: ping\ndata: {"type":"ping"}\n\n') < 2:
                raw += waiting.recv(1 << 16)
    narrow_server.wait_until_idle()
    assert num_aborted(narrow_server) == before + 2
