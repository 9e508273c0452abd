"""Each field of each route is honoured, refused by name, or changes no answer; the page of fields says which."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

import ollama._types as ollama_types
import pytest
from anthropic.types import MessageCountTokensParams, ThinkingConfigParam, ToolChoiceParam
from anthropic.types import message_create_params as anthropic_params
from anthropic.types.beta import BetaOutputConfigParam
from anthropic.types.beta import message_create_params as beta_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import ResponseTextConfigParam, input_token_count_params, response_create_params
from openai.types.shared_params import Reasoning

from quire.errors import UnsupportedFeature
from quire.server.requests.fields import Fields
from tests.server.process import ServerProcess
from tests.server.tool_answers import NOW
from tools.fields_page import PAGE, TABLES, page

USER = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
# The fields that a client of each protocol can send.
CLIENTS: list[tuple[str, Any]] = [
    (CHAT, chat_params.CompletionCreateParamsStreaming),
    (CHAT, chat_params.CompletionCreateParamsNonStreaming),
    (COMPLETIONS, completion_create_params.CompletionCreateParamsStreaming),
    (RESPONSES, response_create_params.ResponseCreateParamsStreaming),
    (RESPONSES, input_token_count_params.InputTokenCountParams),
    (MESSAGES, anthropic_params.MessageCreateParamsStreaming),
    (MESSAGES, beta_params.MessageCreateParamsStreaming),
    (MESSAGES, MessageCountTokensParams),
    ("/v1/embeddings", embedding_create_params.EmbeddingCreateParams),
    ("/api/chat", ollama_types.ChatRequest),
    ("/api/generate", ollama_types.GenerateRequest),
    ("/api/show", ollama_types.ShowRequest),
    ("/api/embed", ollama_types.EmbedRequest),
    ("/api/embeddings", ollama_types.EmbeddingsRequest),
]
OBJECTS: list[tuple[str, str, Any]] = [
    (CHAT, "stream_options", ChatCompletionStreamOptionsParam),
    (COMPLETIONS, "stream_options", ChatCompletionStreamOptionsParam),
    (RESPONSES, "stream_options", response_create_params.StreamOptions),
    (RESPONSES, "text", ResponseTextConfigParam),
    (RESPONSES, "reasoning", Reasoning),
    (MESSAGES, "thinking", ThinkingConfigParam),
    (MESSAGES, "output_config", BetaOutputConfigParam),
    (MESSAGES, "tool_choice", ToolChoiceParam),
    ("/api/chat", "options", ollama_types.Options),
    ("/api/generate", "options", ollama_types.Options),
]
# What makes a body whole, and its answer the same each time.
WHOLE: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 4, "temperature": 0},
    COMPLETIONS: {"prompt": "Z", "max_tokens": 4, "temperature": 0},
    RESPONSES: {"input": "hi", "max_output_tokens": 4, "temperature": 0},
    MESSAGES: {"messages": USER, "max_tokens": 4, "temperature": 0},
    "/api/chat": {"messages": USER, "stream": False, "options": {"num_predict": 4, "temperature": 0}},
    "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": 4, "temperature": 0}},
    "/api/show": {"model": "tiny"},
    "/api/embed": {"input": "hi"},
    "/api/embeddings": {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"text_1": "hi", "text_2": "ho"},
    "/v1/rerank": {"query": "hi", "documents": ["ho"]},
    "/classify": {"input": "hi"},
    "/tokenize": {"messages": USER},
    "/detokenize": {"tokens": [5, 6]},
}
# What no field is, so that reading it fails.
WRONG: list[Any] = [{"?": [{}]}, [[{}]], -7.5, "?\x00"]
# Fields that are read where another one is there, with that field and what is wrong then.
BESIDE: Mapping[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "repeat_last_n": {"repetition_penalty": 2.0},
    "options.repeat_last_n": {"options": {"repeat_penalty": 2.0}},
    "top_logprobs": {"logprobs": True},
    "thinking": {"thinking": {"type": "enabled"}},
    "documents": {"text_1": None, "text_2": None, "queries": ["hi"]},
}
# Tools, and a choice of one where fields of it are read, by route.
CHOICES: Mapping[str, dict[str, Any]] = {
    CHAT: {"tools": [NOW]},
    RESPONSES: {"tools": [{"type": "function", "name": "now"}]},
    MESSAGES: {"tools": [{"name": "now", "input_schema": {"type": "object"}}], "tool_choice": {"type": "tool"}},
}
# What differs in two answers to the same question.
PASSING = ("id", "created", "created_at", "usage", "system_fingerprint")


def fields_of(kind: Any) -> set[str]:
    """Return the names of the fields of a client's type, or of the types of a union."""
    if options := typing.get_args(kind):
        return set().union(*map(fields_of, options))
    return set(kind.model_fields) if hasattr(kind, "model_fields") else set(typing.get_type_hints(kind))


def put(body: dict[str, Any], name: str, value: Any, objects: tuple[str, ...]) -> dict[str, Any]:
    """Return a body with another field, or with another field of an object in it."""
    outer, _, inner = name.partition(".")
    if name in objects and isinstance(value, dict):
        return {**body, name: {**body.get(name, {}), **value}}
    if outer not in objects or not inner:
        return {**body, name: value}
    return {**body, outer: {**body.get(outer, {}), inner: value}}


@pytest.mark.parametrize(("path", "client"), CLIENTS)
def test_every_field_of_a_client_is_in_the_table(path: str, client: Any) -> None:
    assert fields_of(client) <= TABLES[path].names


@pytest.mark.parametrize(("path", "name", "client"), OBJECTS)
def test_every_field_of_an_object_of_a_client_is_in_the_table(path: str, name: str, client: Any) -> None:
    assert name in TABLES[path].objects
    assert fields_of(client) <= TABLES[path].inner[name].names


@pytest.mark.parametrize("path", TABLES)
def test_a_field_is_one_of_the_three(path: str) -> None:
    table = TABLES[path]
    assert len(table.names) == len([*table.honoured, *table.refused, *table.neutral])
    for name in (*table.honoured, *table.refused, *table.neutral):
        assert name.partition(".")[0] in (*table.honoured, name)
    assert all(len(why) > 10 for why in (*table.neutral.values(), *(why for _, why in table.refused.values())))


@pytest.mark.parametrize("path", TABLES)
def test_what_is_refused_is_refused_by_name_unless_it_changes_nothing(path: str) -> None:
    table = TABLES[path]
    for name, (neutral, _) in table.refused.items():
        for value in (None, *neutral):
            Fields(put({}, name, value, table.objects)).check(table)
        # The type counts: 0 is not false.
        others = [int(value) if isinstance(value, bool) else bool(value) for value in neutral if isinstance(value, int)]
        for value in ({"something": "else"}, ["another"], "another", 7, *others):
            with pytest.raises(UnsupportedFeature) as refused:
                Fields(put({}, name, value, table.objects)).check(table)
            assert refused.value.field == name


@pytest.mark.parametrize("path", [path for path, table in TABLES.items() if table.refused])
def test_a_route_refuses_what_its_table_refuses(server: ServerProcess, path: str) -> None:
    table = TABLES[path]
    for name in table.refused:
        response = server.post(path, put(WHOLE[path], name, {"something": "else"}, table.objects))
        assert response.status_code == 400, (name, response.text)
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert message.startswith(f"{name} is not supported: "), message


# Values that neutral fields of a certain type need.
TYPED: Mapping[str, Any] = {
    "metadata": {"a": "b"},
    "prediction": {"a": "b"},
    **dict.fromkeys(("store", "stream_options.include_obfuscation"), True),
    **dict.fromkeys(
        ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "verbosity"), "high"
    ),
    "options": {"num_ctx": 7, "temperature": 2.0},
}


@pytest.mark.parametrize("path", [path for path, table in TABLES.items() if table.neutral and path != "/classify"])
def test_what_has_no_effect_has_none(server: ServerProcess, path: str) -> None:
    table, body = TABLES[path], WHOLE[path]
    for name in table.neutral:
        body = put(body, name, TYPED.get(name, ["anything", 7]), table.objects)
    if "stream_options" in body:
        body |= {"stream": True}
        assert server.post(path, body).status_code == 200
        body = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    responses = [server.post(path, asked) for asked in (WHOLE[path], body)]
    assert [response.status_code for response in responses] == [200, 200], responses[1].text
    plain, full = (without_times(response.json()) for response in responses)
    for repeated in ("metadata", "user", "text", "stream_options"):
        if path == RESPONSES:
            full.pop(repeated, None)
            plain.pop(repeated, None)
    if path == RESPONSES:
        assert full.pop("reasoning") == body["reasoning"]
        plain.pop("reasoning")
    assert full == plain


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in answer.items() if name not in PASSING and not name.endswith("_duration")}
    for item in kept.get("output", ()):
        item.pop("id")
    return kept


# The model of these tests has no classes.
@pytest.mark.parametrize("path", [path for path in TABLES if path != "/classify"])
def test_what_is_honoured_is_read(server: ServerProcess, path: str) -> None:
    table, unread = TABLES[path], {}
    for name in table.honoured:
        outer = name.partition(".")[0]
        seen = []
        for wrong in WRONG:
            beside = CHOICES[path] if "tool_" in outer else BESIDE.get(name, BESIDE.get(outer, {}))
            body = put({**WHOLE[path], **beside}, name, wrong, table.objects)
            response = server.post(path, body)
            if response.status_code in (400, 404):
                error = response.json()["error"]
                seen.append(error if isinstance(error, str) else error["message"])
        if not any(name in message for message in seen):
            unread[name] = seen
    assert not {name: seen[:2] for name, seen in unread.items()}


def test_the_page_is_that_of_the_tables() -> None:
    assert PAGE.read_text() == page(), "run python -m tools.fields_page"
