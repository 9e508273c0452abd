"""Tools over the chat endpoint: models that call them, the form of calls, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import AddedToken

from quire.server.settings import TOOL_CALL_PARSERS
from quire.text.tool_calls import FORMATS
from tests.server import checkpoint
from tests.server.process import ServerProcess, running
from tests.server.streams import stream, text_of
from tests.server.test_errors import anything
from tests.server.tool_answers import (
    ALL_CALLS,
    ASK,
    CALLS,
    CHAT,
    HAS_GRAMMARS,
    NOW,
    PARIS,
    USER,
    WEATHER,
    Serve,
    ask,
    joined,
    names_and_arguments,
    needs_grammars,
    reasons,
)
from tests.server.tool_checkpoint import BARE, FORMS, MARKERS


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_calls_tools_has_them_called(serve: Serve, form: str) -> None:
    server = serve(form)
    choice = ask(server)
    message = choice["message"]
    assert names_and_arguments(message["tool_calls"]) == ALL_CALLS[form]
    assert message["content"] == (None if form in BARE else "I look.")
    assert choice["finish_reason"] == "tool_calls"
    shape = "[a-zA-Z0-9]{9}" if form == "mistral" else "call_[0-9a-f]{24}"
    assert all(re.fullmatch(shape, call["id"]) for call in message["tool_calls"])

    _, chunks = stream(server, CHAT, ASK)
    assert names_and_arguments(joined(chunks)) == ALL_CALLS[form]
    assert text_of(chunks) == (message["content"] or "")
    assert reasons(chunks) == ["tool_calls"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}

    said = f"Tool calls: read in the format {form}, which the instructions of the chat template show"
    assert said in server.log.read_text()
    (card,) = server.http.get("/v1/models").json()["data"]
    assert card["tool_call_parser"] == form


def test_openais_client_streams_calls(tool_client: openai.OpenAI) -> None:
    tools: Any = [WEATHER, NOW]
    with tool_client.chat.completions.stream(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        tools=tools,
        temperature=0,
        stream_options={"include_usage": True},
    ) as events:
        kinds = [event.type for event in events]
        final = events.get_final_completion()
    (choice,) = final.choices
    assert choice.message.content == "I look."
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == CALLS
    assert choice.finish_reason == "tool_calls"
    assert final.usage.completion_tokens > len(CALLS)
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == 1


def test_samples_usage_logprobs_and_token_ids_go_with_calls(hermes: ServerProcess) -> None:
    more = {"n": 2, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    whole = hermes.post(CHAT, {**ASK, **more}).json()
    num_tokens = len(whole["choices"][0]["token_ids"])
    for choice in whole["choices"]:
        assert names_and_arguments(choice["message"]["tool_calls"]) == CALLS
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == num_tokens
    _, chunks = stream(hermes, CHAT, {**ASK, **more, "stream_options": {"include_usage": True}})
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * num_tokens
    for index in (0, 1):
        assert names_and_arguments(joined(chunks, index)) == CALLS
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        ids = [token_id for part in parts for token_id in part.get("token_ids") or ()]
        assert ids == whole["choices"][index]["token_ids"]
        logprobs = [entry for part in parts for entry in (part["logprobs"] or {}).get("content", ())]
        assert logprobs == whole["choices"][index]["logprobs"]["content"]


def test_what_is_no_call_is_an_answer_as_ever(hermes: ServerProcess) -> None:
    choice = ask(hermes, chat_template_kwargs={"style": "Q"})
    assert choice["message"] == {"role": "assistant", "refusal": None, "content": "xyz"}
    assert choice["finish_reason"] == "stop"
    _, chunks = stream(hermes, CHAT, {**ASK, "chat_template_kwargs": {"style": "Q"}})
    assert (text_of(chunks), reasons(chunks)) == ("xyz", ["stop"])


def test_a_stop_string_ends_calls_too(hermes: ServerProcess) -> None:
    choice = ask(hermes, stop=["</tool_call>"])
    assert names_and_arguments(choice["message"]["tool_calls"]) == [("get_weather", PARIS)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "</tool_call>")


def test_a_call_cut_off_by_the_length_is_no_end_of_calls(hermes: ServerProcess) -> None:
    num_tokens = len(ask(hermes, return_token_ids=True)["token_ids"])
    seen = set()
    for max_tokens in range(1, num_tokens):
        choice = ask(hermes, max_tokens=max_tokens)
        assert choice["finish_reason"] == "length"
        calls = names_and_arguments(choice["message"].get("tool_calls", []))
        _, chunks = stream(hermes, CHAT, {**ASK, "max_tokens": max_tokens})
        assert names_and_arguments(joined(chunks)) == calls
        assert text_of(chunks) == (choice["message"]["content"] or "")
        assert reasons(chunks) == ["length"]
        for name, arguments in calls:
            assert name == "get_weather"
            assert PARIS.startswith(arguments)
            seen.add(arguments)
    # Without a grammar nothing says that what has begun will become a call.
    assert PARIS in seen
    assert (len(seen) > 1) == HAS_GRAMMARS


@pytest.mark.skipif(HAS_GRAMMARS, reason="a grammar lets the model call only what there is")
def test_a_function_that_is_not_there_cannot_be_called(hermes: ServerProcess) -> None:
    choice = ask(hermes, tools=[NOW])
    assert "tool_calls" not in choice["message"]
    assert '<tool_call>\n{"name": "get_weather"' in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


def test_with_none_tools_are_neither_told_nor_read(hermes: ServerProcess) -> None:
    body = {**ASK, "tool_choice": "none", "return_token_ids": True}
    answer = hermes.post(CHAT, body).json()
    plain = hermes.post(CHAT, {key: value for key, value in body.items() if key not in ("tools", "tool_choice")}).json()
    assert answer["choices"] == plain["choices"]
    assert answer["prompt_token_ids"] == plain["prompt_token_ids"]
    # The marks are special tokens, which text leaves out.
    assert answer["choices"][0]["message"]["content"].startswith('I look.\n\n{"name": "get_weather"')


def test_tools_results_and_earlier_calls_reach_the_prompt(hermes: ServerProcess) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": PARIS}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    body = {"messages": messages, "tools": [WEATHER, NOW]}
    ids = hermes.post("/tokenize", body).json()["tokens"]
    prompt = hermes.post("/detokenize", {"tokens": ids}).json()["prompt"]
    listed = [WEATHER, {**NOW, "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
    assert prompt == (
        f"<|bos|><|system|>{json.dumps(listed)} as in <tool_call>JSON</tool_call><|eos|><|user|>hi<|eos|>"
        "<|assistant|>get_weather:Paris<|eos|><|tool|>rain<|eos|><|assistant|>"
    )
    answer = hermes.post(CHAT, {**ASK, **body, "return_token_ids": True}).json()
    assert answer["prompt_token_ids"] == ids
    pinned = hermes.post("/pin_prefix", {"name": "tools", **body}).json()
    assert pinned["pinned_tokens"] == (len(ids) - 1) // 16 * 16
    hermes.post("/unpin_prefix", {"name": "tools"})


def test_arguments_that_are_no_json_are_named(hermes: ServerProcess) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{"}}
    response = hermes.post(CHAT, {**ASK, "messages": [*USER, {"role": "assistant", "tool_calls": [call]}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


ALLOWED = {"type": "allowed_tools"}
PARAMETERS = "tools[0].function.parameters"
IN_ALLOWED = "tool_choice.allowed_tools"


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [function(name=f"f{idx}") for idx in range(129)]}, "tools"),
        ({"tools": [function(description="x" * (1 << 18))]}, "tools"),
        ({"tools": [WEATHER, 1]}, "tools[1]"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": "f"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        *(
            ({"tools": [NOW, function(name=bad)]}, "tools[1].function.name")
            for bad in anything("", "a b", "é", "x" * 65, 1, [])
        ),
        ({"tools": [NOW, WEATHER, NOW]}, "tools[2].function.name"),
        ({"tools": [function(description=1)]}, "tools[0].function.description"),
        *(
            ({"tools": [function(parameters=bad)]}, "tools[0].function.parameters")
            for bad in anything([], "x", True, 1)
        ),
        ({"tools": [function(parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [function(parameters={"type": ["object", "null"]})]}, "tools[0].function.parameters.type"),
        *(
            ({"tools": [function(parameters={"type": "object", "properties": bad})]}, f"{PARAMETERS}.properties")
            for bad in anything(True, [], "x")
        ),
        *(
            ({"tools": [function(parameters={"type": "object", "required": bad})]}, f"{PARAMETERS}.required")
            for bad in anything(True, {}, "x", [5], ["x", None])
        ),
        ({"tools": [function(strict="yes")]}, "tools[0].function.strict"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"tool_choice": {}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": "now"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {"name": "nothing"}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": []}}, "tool_choice.allowed_tools"),
        *(
            ({"tool_choice": ALLOWED | {"allowed_tools": {"mode": mode, "tools": [NOW]}}}, f"{IN_ALLOWED}.mode")
            for mode in anything(None, "none", "AUTO", 1, [])
        ),
        *(
            ({"tool_choice": ALLOWED | {"allowed_tools": {"mode": "auto", "tools": bad}}}, f"{IN_ALLOWED}.tools")
            for bad in anything(None, [], {}, "now")
        ),
        *(
            (
                {"tool_choice": ALLOWED | {"allowed_tools": {"mode": "auto", "tools": [NOW, bad]}}},
                f"{IN_ALLOWED}.tools[1]{field}",
            )
            for bad, field in [
                ("now", ""),
                ({"function": {"name": "now"}}, ".type"),
                ({"type": "custom", "custom": {"name": "now"}}, ".type"),
                ({"type": "function"}, ".function.name"),
                ({"type": "function", "function": "now"}, ".function"),
                ({"type": "function", "function": {"name": "nothing"}}, ".function.name"),
                ({"type": "function", "function": {"name": ["now"]}}, ".function.name"),
            ]
        ),
        (
            {"tool_choice": ALLOWED | {"allowed_tools": {"mode": "auto", "tools": [NOW]}}, "tools": None},
            f"{IN_ALLOWED}.tools[0].function.name",
        ),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_a_bad_tool_is_a_400_that_names_it(hermes: ServerProcess, body: dict[str, Any], field: str) -> None:
    for more in ({}, {"stream": True}):
        response = hermes.post(CHAT, {**ASK, **body, **more})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (field, "invalid_parameter")


@needs_grammars
@pytest.mark.parametrize(
    ("field", "value", "texts"),
    [
        ("response_format", {"type": "json_object"}, None),
        ("structured_outputs", {"regex": "a/b|c"}, ("a/b", "c")),
        ("guided_choice", ['a"b'], ('a"b',)),
    ],
)
def test_text_beside_tools_has_the_form_that_the_request_wants(
    hermes: ServerProcess, field: str, value: Any, texts: tuple[str, ...] | None
) -> None:
    found = []
    for seed in range(8):
        choice = ask(hermes, **{field: value}, temperature=100, seed=seed, max_tokens=40)
        if "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop":
            found.append(choice["message"]["content"])
    assert found
    for text in found:
        assert isinstance(json.loads(text), dict) if texts is None else text in texts


@needs_grammars
def test_a_lark_grammar_beside_that_of_the_tools_is_refused(hermes: ServerProcess) -> None:
    error = hermes.post(CHAT, {**ASK, "guided_grammar": 'start: "a"'}).json()["error"]
    assert (error["param"], error["code"]) == ("structured_outputs.grammar", "unsupported_feature")


@pytest.mark.parametrize("field", ["functions", "function_call"])
def test_the_older_form_is_refused_with_the_newer_ones_name(hermes: ServerProcess, field: str) -> None:
    value = [{"name": "now"}] if field == "functions" else {"name": "now"}
    error = hermes.post(CHAT, {"messages": USER, field: value}).json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_feature")
    assert "tools" in error["message"]


@pytest.mark.skipif(HAS_GRAMMARS, reason="calls can be required here")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_calls_cannot_be_required_without_grammars(hermes: ServerProcess, choice: Any) -> None:
    error = hermes.post(CHAT, {**ASK, "tool_choice": choice}).json()["error"]
    assert (error["param"], error["code"]) == ("tool_choice", "unsupported_feature")
    assert "pip install llguidance" in error["message"]


@needs_grammars
def test_a_strict_schema_that_cannot_be_held_to_is_a_400(hermes: ServerProcess) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for is_strict, status in ((True, 400), (False, 200)):
        response = hermes.post(CHAT, {**ASK, "tools": [function(parameters=odd, strict=is_strict)]})
        assert response.status_code == status, response.text
    error = hermes.post(CHAT, {**ASK, "tools": [function(parameters=odd, strict=True)]}).json()["error"]
    assert error["param"] == "tools[0].function.parameters"


def test_a_model_that_knows_no_tools_says_so(server: ServerProcess) -> None:
    response = server.post(CHAT, {"messages": USER, "tools": [NOW]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_feature")
    assert server.http.get("/v1/models").json()["data"][0]["tool_call_parser"] is None


@pytest.mark.slow
def test_a_template_that_does_not_show_its_format_needs_the_option(tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[-1].content }}<|assistant|>"
    marks = [AddedToken(text, special=True, normalized=False) for text in MARKERS]
    path = (0.5, ["<|assistant|>", "[TOOL_CALLS]", "<|eos|>"])
    folder = checkpoint.save(tmp_path / "model", template, marks, [path])
    for flags, status in (((), 400), (("--tool-call-parser", "mistral"), 200)):
        with running(folder, tmp_path / "log", "--num-kv-blocks", "300", *flags) as process:
            response = process.post(CHAT, {**ASK, "max_tokens": 1})
            assert response.status_code == status
            if flags:
                content = response.json()["choices"][0]["message"]["content"]
                assert content == ("" if HAS_GRAMMARS else "[TOOL_CALLS]")
                assert "as --tool-call-parser says" in process.log.read_text()
            else:
                assert "--tool-call-parser" in response.json()["error"]["message"]
                assert "show no format; --tool-call-parser can set it" in process.log.read_text()


def test_the_option_knows_the_formats_that_there_are() -> None:
    assert list(TOOL_CALL_PARSERS) == ["auto", *FORMATS]
