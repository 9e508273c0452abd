"""`tool_choice` and allowed tools: the calls that the model must, may and may not make."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.process import ServerProcess
from tests.server.streams import stream
from tests.server.tool_answers import (
    ALL_CALLS,
    ASK,
    CHAT,
    NOW,
    WEATHER,
    Serve,
    ask,
    joined,
    names_and_arguments,
    needs_grammars,
    reasons,
)
from tests.server.tool_checkpoint import REQUIRED_FORMS


@needs_grammars
@pytest.mark.parametrize("form", REQUIRED_FORMS)
@pytest.mark.parametrize("style", ["Q", pytest.param("!", marks=pytest.mark.slow)])
def test_required_calls_come_whatever_the_model_would_say(serve: Serve, form: str, style: str) -> None:
    more: dict[str, Any] = {
        "tool_choice": "required",
        "chat_template_kwargs": {"style": style},
        "parallel_tool_calls": False,
    }
    weather = {**WEATHER, "function": {**WEATHER["function"], "parameters": SHORT}}
    choice = ask(serve(form), tools=[weather, NOW], **more)
    assert choice["message"]["content"] is None
    ((name, arguments),) = names_and_arguments(choice["message"]["tool_calls"])
    assert choice["finish_reason"] == "tool_calls"
    assert (name, set(json.loads(arguments))) in [("get_weather", {"city"}), ("now", set())]


SHORT = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@needs_grammars
@pytest.mark.parametrize("form", REQUIRED_FORMS)
def test_a_named_function_is_called_once(serve: Serve, form: str) -> None:
    choice = {"type": "function", "function": {"name": "now"}}
    answer = ask(serve(form), tool_choice=choice, chat_template_kwargs={"style": "Q"})
    assert names_and_arguments(answer["message"]["tool_calls"]) == [("now", "{}")]
    # It was the client's choice that there is a call: OpenAI says "stop" then.
    assert answer["finish_reason"] == "stop"
    _, chunks = stream(serve(form), CHAT, {**ASK, "tool_choice": choice, "temperature": 2, "n": 3})
    assert [names_and_arguments(joined(chunks, index)) for index in range(3)] == [[("now", "{}")]] * 3
    assert reasons(chunks) == ["stop"] * 3


def allowed(mode: Any, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@needs_grammars
@pytest.mark.parametrize("form", REQUIRED_FORMS)
def test_of_the_tools_some_may_be_allowed(serve: Serve, form: str) -> None:
    server = serve(form)
    # The model would call the other one; required, it calls what it may.
    choice = ask(server, tool_choice=allowed("required", "now"), parallel_tool_calls=False, return_token_ids=True)
    assert names_and_arguments(choice["message"]["tool_calls"]) == [("now", "{}")]
    assert choice["finish_reason"] == "tool_calls"
    _, chunks = stream(server, CHAT, {**ASK, "tool_choice": allowed("required", "now", "now"), "n": 2})
    for index in (0, 1):
        assert set(names_and_arguments(joined(chunks, index))) == {("now", "{}")}
    # Asked for no call it need not make one, and what it calls is allowed.
    for seed in range(4):
        answer = ask(server, tool_choice=allowed("auto", "now"), temperature=2, seed=seed)
        whole = answer["message"].get("tool_calls", ())[: None if answer["finish_reason"] != "length" else -1]
        assert set(names_and_arguments(list(whole))) <= {("now", "{}")}
    assert (
        names_and_arguments(ask(server, tool_choice=allowed("auto", "get_weather", "now"))["message"]["tool_calls"])
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
    calls = completion.choices[0].message.tool_calls
    assert calls is not None
    (call,) = calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("now", "{}")
