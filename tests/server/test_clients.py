"""The clients of Anthropic and Ollama against a server: a conversation with a call of a tool, streams and errors."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.server.process import ServerProcess
from tests.server.tool_answers import CITY

# Quick to run, but the clients are not in every environment: the extra `test` has them.
pytestmark = pytest.mark.slow

USER = [{"role": "user", "content": "hi"}]


def get_weather(city: str) -> str:
    """Look.

    Args:
        city: The city.
    """
    return f"rain in {city}"


def test_anthropics_client(hermes: ServerProcess) -> None:
    anthropic: Any = importlib.import_module("anthropic")
    tools = [{"name": "get_weather", "description": "Looks.", "input_schema": CITY}]
    request: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "tools": tools, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=hermes.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(messages=USER, **request)
        text, call = message.content
        assert (text.text, call.name, call.input) == ("I look.", "get_weather", {"city": "Paris"})
        assert message.stop_reason == "tool_use"
        with client.messages.stream(messages=USER, **request) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        assert {"text", "input_json", "content_block_stop", "message_stop"} <= set(kinds)
        assert [block.model_dump(exclude={"id", "parsed_output"}) for block in final.content] == [
            block.model_dump(exclude={"id"}) for block in message.content
        ]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": get_weather(**call.input)}
        turns = [*USER, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        usage = client.messages.create(messages=turns, **request).usage
        count = client.messages.count_tokens(model="tiny", messages=turns, tools=tools).input_tokens
        assert usage.input_tokens + usage.cache_read_input_tokens == count
        assert usage.cache_read_input_tokens > 0
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            client.messages.create(messages=USER, **{**request, "model": "other"})
        with pytest.raises(anthropic.BadRequestError, match="max_tokens must be"):
            client.messages.create(messages=USER, **{**request, "max_tokens": 0})


def test_ollamas_client(hermes: ServerProcess) -> None:
    ollama: Any = importlib.import_module("ollama")
    with ollama.Client(host=hermes.url) as client:
        request: dict[str, Any] = {"model": "tiny", "tools": [get_weather], "options": {"temperature": 0}}
        answer = client.chat(messages=USER, **request)
        (call,) = answer.message.tool_calls
        assert (answer.message.content, call.function.name) == ("I look.", "get_weather")
        parts = list(client.chat(messages=USER, stream=True, **request))
        assert "".join(part.message.content for part in parts) == "I look."
        assert [each for part in parts for each in part.message.tool_calls or ()] == [call]
        result = {"role": "tool", "tool_name": "get_weather", "content": get_weather(**call.function.arguments)}
        again = client.chat(messages=[*USER, answer.message, result], **request)
        assert again.prompt_eval_count > answer.prompt_eval_count
        assert again.eval_duration > 0
        texts = [part.response for part in client.generate("tiny", "hi", stream=True, options={"temperature": 0})]
        assert "".join(texts) == client.generate("tiny", "hi", options={"temperature": 0}).response
        assert [model.model for model in client.list().models] == ["tiny"]
        assert client.show("tiny").capabilities == ["completion", "tools", "embedding"]
        assert [model.model for model in client.ps().models] == ["tiny"]
        with pytest.raises(ollama.ResponseError, match="does not exist"):
            client.chat("other", messages=USER)
        with pytest.raises(ollama.ResponseError, match=r"options\.top_p must be"):
            list(client.chat("tiny", messages=USER, options={"top_p": 7.0}, stream=True))
