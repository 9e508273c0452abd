"""The bundled model calls tools, reads their results, and thinks where it is asked to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.outputs.outputs import CompletionOutput
from tests.engine.bundled import load

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
WEATHER = {"name": "get_weather", "description": "The weather of a city.", "parameters": CITY}
ADD = {"name": "add", "description": "The sum of two numbers.", "parameters": NUMBERS}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, ADD)]
GREEDY = SamplingParams(temperature=0, max_tokens=100)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Gives the bundled model."""
    llm = load()
    yield llm
    assert llm.usage().used == 0
    llm.close()


def ask(llm: LLM, *messages: str | dict[str, Any], **options: Any) -> CompletionOutput:
    """Return the answer of a chat; texts are the user's."""
    chat = [{"role": "user", "content": each} if isinstance(each, str) else each for each in messages]
    (output,) = llm.chat(chat, GREEDY, use_tqdm=False, **options)
    assert output.error is None
    return output.outputs[0]


def called(sample: CompletionOutput) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, json.loads(call.arguments)) for call in sample.tool_calls or ()]


@pytest.mark.parametrize("tools", [TOOLS, TOOLS[::-1]], ids=["as listed", "the other way round"])
def test_the_tool_that_answers_is_called(llm: LLM, tools: Sequence[dict[str, Any]]) -> None:
    sample = ask(llm, "Do I need an umbrella in Paris?", tools=tools)
    assert called(sample) == [("get_weather", {"city": "Paris"})]
    assert (sample.content, sample.finish_reason) == ("", "tool_calls")
    assert called(ask(llm, "What is 17 + 25?", tools=tools)) == [("add", {"a": 17, "b": 25})]


def test_the_result_is_in_the_answer(llm: LLM) -> None:
    question = {"role": "user", "content": "What is the weather in Oslo?"}
    sample = ask(llm, question, tools=TOOLS)
    calls = [call.as_message() for call in sample.tool_calls or ()]
    turn: list[dict[str, Any]] = [question, {"role": "assistant", "content": sample.content, "tool_calls": calls}]
    for result, word in (("snow", "snowing"), ("rain", "raining")):
        told = {"role": "tool", "tool_call_id": calls[0]["id"], "content": result}
        answer = ask(llm, *turn, told, tools=TOOLS)
        assert (answer.content, called(answer)) == (f"It is {word} in Oslo.", [])


def test_a_question_that_needs_no_tool_is_answered(llm: LLM) -> None:
    for options in ({}, {"tools": TOOLS}):
        sample = ask(llm, "What is the opposite of hot?", **options)
        assert sample.content == "The opposite of hot is cold."
        assert not sample.tool_calls
        assert not sample.reasoning


def test_a_call_can_be_required(llm: LLM) -> None:
    sample = ask(llm, "Who are you?", tools=TOOLS, tool_choice="required")
    assert [name for name, _ in called(sample)] in (["get_weather"], ["add"])
    choice = {"type": "function", "function": {"name": "add"}}
    (call,) = called(ask(llm, "What is 3 plus 4?", tools=TOOLS, tool_choice=choice))
    assert call == ("add", {"a": 3, "b": 4})


def test_thinking_comes_before_the_answer_where_it_is_asked_for(llm: LLM) -> None:
    sample = ask(llm, "What is the opposite of hot?", chat_template_kwargs={"enable_thinking": True})
    assert sample.reasoning
    assert sample.reasoning.startswith("The user asks for an opposite.")
    assert sample.content == "The opposite of hot is cold."
    plain = ask(llm, "What is the opposite of hot?", chat_template_kwargs={"enable_thinking": False})
    assert (plain.reasoning, plain.content) == ("", "The opposite of hot is cold.")


def test_thinking_comes_before_a_call(llm: LLM) -> None:
    sample = ask(llm, "Is it raining in Rome?", tools=TOOLS, chat_template_kwargs={"enable_thinking": True})
    assert "weather in Rome" in (sample.reasoning or "")
    assert called(sample) == [("get_weather", {"city": "Rome"})]


def test_a_budget_ends_the_thinking(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Where does a fox live?"}]
    variables = {"enable_thinking": True}
    params = SamplingParams(temperature=0, max_tokens=60, thinking_token_budget=3)
    (output,) = llm.chat(messages, params, use_tqdm=False, chat_template_kwargs=variables)
    sample = output.outputs[0]
    assert llm.get_tokenizer().encode(sample.reasoning or "", add_special_tokens=False) == sample.token_ids[:3]
    assert sample.content
