"""Tools over the chat endpoint: models that call them, how calls are told, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import AddedToken

from quire.server.settings import TOOL_CALL_PARSERS
from quire.text.tool_calls import FORMATS
from tests.server import checkpoint
from tests.server.process import PATIENCE_S, ServerProcess, running
from tests.server.streams import stream, text_of
from tests.server.tool_checkpoint import MARKERS, save

CHAT = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Looks.", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
USER = [{"role": "user", "content": "hi"}]
ASK: dict[str, Any] = {"messages": USER, "tools": [WEATHER, NOW], "temperature": 0, "max_tokens": 200}
PARIS = '{"city": "Paris"}'
CALLS = [("get_weather", PARIS)]
ALL_CALLS = {"hermes": CALLS, "mistral": CALLS, "llama3": [*CALLS, ("now", "{}")]}
HAS_GRAMMARS = importlib.util.find_spec("llguidance") is not None
needs_grammars = pytest.mark.skipif(not HAS_GRAMMARS, reason="calls are required through llguidance")

Serve = Callable[[str], ServerProcess]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Gives the server of a model that writes calls in a format, started when it is first asked for."""
    servers: dict[str, ServerProcess] = {}
    with ExitStack() as stack:

        def start(form: str) -> ServerProcess:
            if form not in servers:
                folder = save(tmp_path_factory.mktemp("models") / form, form)
                log = tmp_path_factory.mktemp("logs") / "tools.log"
                flags = ("--num-kv-blocks", "400", "--max-num-seqs", "8", "--pin-limit", "0.1")
                servers[form] = stack.enter_context(running(folder, log, *flags))
            return servers[form]

        yield start


@pytest.fixture
def hermes(serve: Serve) -> ServerProcess:
    """The server of Hermes' format."""
    return serve("hermes")


@pytest.fixture
def tool_client(hermes: ServerProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's client, which does not try again."""
    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def ask(server: ServerProcess, **more: Any) -> dict[str, Any]:
    """Return the one choice of an answer."""
    response = server.post(CHAT, {**ASK, **more})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


def told(calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    assert all(call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """Return a sample's calls as a client puts them together."""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            for part in choice["delta"].get("tool_calls", ()):
                if part["index"] == len(calls):
                    assert set(part) == {"index", "id", "type", "function"}
                    calls.append({**part, "function": dict(part["function"])})
                else:
                    assert set(part) == {"index", "function"}
                    assert set(part["function"]) == {"arguments"}
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return calls


def reasons(chunks: list[dict[str, Any]]) -> list[str]:
    found = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    return [reason for reason in found if reason is not None]


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_model_that_calls_tools_has_them_called(serve: Serve, form: str) -> None:
    server = serve(form)
    choice = ask(server)
    message = choice["message"]
    assert told(message["tool_calls"]) == ALL_CALLS[form]
    assert message["content"] == (None if form == "llama3" else "I look.")
    assert choice["finish_reason"] == "tool_calls"
    shape = "[a-zA-Z0-9]{9}" if form == "mistral" else "call_[0-9a-f]{24}"
    assert all(re.fullmatch(shape, call["id"]) for call in message["tool_calls"])

    _, chunks = stream(server, CHAT, ASK)
    assert told(joined(chunks)) == ALL_CALLS[form]
    assert text_of(chunks) == (message["content"] or "")
    assert reasons(chunks) == ["tool_calls"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}

    assert f"Tool calls: read in the format {form}, as the chat template shows" in server.log.read_text()
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
        assert told(choice["message"]["tool_calls"]) == CALLS
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == num_tokens
    _, chunks = stream(hermes, CHAT, {**ASK, **more, "stream_options": {"include_usage": True}})
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * num_tokens
    for index in (0, 1):
        assert told(joined(chunks, index)) == CALLS
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
    assert told(choice["message"]["tool_calls"]) == [("get_weather", PARIS)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", "</tool_call>")


def test_a_call_cut_off_by_the_length_is_no_end_of_calls(hermes: ServerProcess) -> None:
    num_tokens = len(ask(hermes, return_token_ids=True)["token_ids"])
    seen = set()
    for max_tokens in range(1, num_tokens):
        choice = ask(hermes, max_tokens=max_tokens)
        assert choice["finish_reason"] == "length"
        calls = told(choice["message"].get("tool_calls", []))
        _, chunks = stream(hermes, CHAT, {**ASK, "max_tokens": max_tokens})
        assert told(joined(chunks)) == calls
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
        f"<|bos|><|system|>{json.dumps(listed)} as in <tool_call><|eos|><|user|>hi<|eos|>"
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
            for bad in ("", "a b", "é", "x" * 65, 1, [])
        ),
        ({"tools": [NOW, WEATHER, NOW]}, "tools[2].function.name"),
        ({"tools": [function(description=1)]}, "tools[0].function.description"),
        *(({"tools": [function(parameters=bad)]}, "tools[0].function.parameters") for bad in ([], "x", True, 1)),
        ({"tools": [function(parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [function(parameters={"type": ["object", "null"]})]}, "tools[0].function.parameters.type"),
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
            for mode in (None, "none", "AUTO", 1, [])
        ),
        *(
            ({"tool_choice": ALLOWED | {"allowed_tools": {"mode": "auto", "tools": bad}}}, f"{IN_ALLOWED}.tools")
            for bad in (None, [], {}, "now")
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


@pytest.mark.parametrize(
    ("field", "value"),
    [("response_format", {"type": "json_object"}), ("structured_outputs", {"regex": "a"}), ("guided_choice", ["a"])],
)
def test_another_grammar_beside_that_of_the_tools_is_refused(hermes: ServerProcess, field: str, value: Any) -> None:
    error = hermes.post(CHAT, {**ASK, field: value}).json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_feature")


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
    assert "quire[structured]" in error["message"]


@needs_grammars
@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize("style", ["Q", "!"])
def test_required_calls_come_whatever_the_model_would_say(serve: Serve, form: str, style: str) -> None:
    more = {"tool_choice": "required", "chat_template_kwargs": {"style": style}, "parallel_tool_calls": False}
    choice = ask(serve(form), tools=[WEATHER | {"function": {**WEATHER["function"], "parameters": SHORT}}, NOW], **more)
    assert choice["message"]["content"] is None
    ((name, arguments),) = told(choice["message"]["tool_calls"])
    assert choice["finish_reason"] == "tool_calls"
    assert (name, set(json.loads(arguments))) in [("get_weather", {"city"}), ("now", set())]


SHORT = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@needs_grammars
@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_named_function_is_called_once(serve: Serve, form: str) -> None:
    choice = {"type": "function", "function": {"name": "now"}}
    answer = ask(serve(form), tool_choice=choice, chat_template_kwargs={"style": "Q"})
    assert told(answer["message"]["tool_calls"]) == [("now", "{}")]
    # It was the client's choice that there is a call: OpenAI says "stop" then.
    assert answer["finish_reason"] == "stop"
    _, chunks = stream(serve(form), CHAT, {**ASK, "tool_choice": choice, "temperature": 2, "n": 3})
    assert [told(joined(chunks, index)) for index in range(3)] == [[("now", "{}")]] * 3
    assert reasons(chunks) == ["stop"] * 3


def allowed(mode: Any, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@needs_grammars
@pytest.mark.parametrize("form", sorted(FORMATS))
def test_of_the_tools_some_may_be_allowed(serve: Serve, form: str) -> None:
    server = serve(form)
    # The model would call the other one; required, it calls what it may.
    choice = ask(server, tool_choice=allowed("required", "now"), parallel_tool_calls=False, return_token_ids=True)
    assert told(choice["message"]["tool_calls"]) == [("now", "{}")]
    assert choice["finish_reason"] == "tool_calls"
    _, chunks = stream(server, CHAT, {**ASK, "tool_choice": allowed("required", "now", "now"), "n": 2})
    for index in (0, 1):
        assert set(told(joined(chunks, index))) == {("now", "{}")}
    # Asked for no call it need not make one, and what it calls is allowed.
    for seed in range(4):
        answer = ask(server, tool_choice=allowed("auto", "now"), temperature=2, seed=seed)
        whole = answer["message"].get("tool_calls", ())[: None if answer["finish_reason"] != "length" else -1]
        assert set(told(list(whole))) <= {("now", "{}")}
    assert (
        told(ask(server, tool_choice=allowed("auto", "get_weather", "now"))["message"]["tool_calls"])
        == (ALL_CALLS[form])
    )


@needs_grammars
def test_all_tools_are_told_whichever_are_allowed(hermes: ServerProcess) -> None:
    prompts = [
        hermes.post(CHAT, {**ASK, "tool_choice": choice, "return_token_ids": True, "max_tokens": 1}).json()
        for choice in ("auto", "required", allowed("auto", "now"), allowed("required", "get_weather"))
    ]
    assert len({tuple(prompt["prompt_token_ids"]) for prompt in prompts}) == 1


@needs_grammars
def test_openais_client_says_what_is_allowed(tool_client: openai.OpenAI) -> None:
    tools: Any = [WEATHER, NOW]
    choice: Any = allowed("required", "now")
    completion = tool_client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=0,
    )
    (call,) = completion.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("now", "{}")


@needs_grammars
def test_a_strict_schema_that_cannot_be_held_to_is_a_400(hermes: ServerProcess) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "colour"}}}
    for is_strict, status in ((True, 400), (False, 200)):
        response = hermes.post(CHAT, {**ASK, "tools": [function(parameters=odd, strict=is_strict)]})
        assert response.status_code == status, response.text
    assert (
        hermes.post(CHAT, {**ASK, "tools": [function(parameters=odd, strict=True)]}).json()["error"]["param"] == "tools"
    )


def test_a_model_that_knows_no_tools_says_so(server: ServerProcess) -> None:
    response = server.post(CHAT, {"messages": USER, "tools": [NOW]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_feature")
    assert server.http.get("/v1/models").json()["data"][0]["tool_call_parser"] is None


def test_a_template_that_does_not_show_its_format_needs_the_option(tmp_path: Path) -> None:
    template = "{% if tools %}{{ tools | tojson }}{% endif %}<|assistant|>"
    marks = [AddedToken(text, special=True, normalized=False) for text in MARKERS]
    path = (0.5, ["<|assistant|>", "[TOOL_CALLS]", "<|eos|>"])
    folder = checkpoint.save(tmp_path / "model", template, marks, [path])
    for flags, status in (((), 400), (("--tool-call-parser", "mistral"), 200)):
        with running(folder, tmp_path / "log", "--num-kv-blocks", "300", *flags) as process:
            response = process.post(CHAT, {**ASK, "max_tokens": 1})
            assert response.status_code == status
            if flags:
                assert response.json()["choices"][0]["message"]["content"] == "[TOOL_CALLS]"
                assert "as --tool-call-parser says" in process.log.read_text()
            else:
                assert "--tool-call-parser" in response.json()["error"]["message"]
                assert "does not show the format" in process.log.read_text()


def test_the_option_knows_the_formats_that_there_are() -> None:
    assert list(TOOL_CALL_PARSERS) == ["auto", *FORMATS]
