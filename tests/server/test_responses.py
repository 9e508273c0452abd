"""OpenAI's Responses without state, with OpenAI's client: whole responses, streams, tools, forms and refusals."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.process import ServerProcess
from tests.server.streams import named_events
from tests.server.test_disconnects import num_aborted, send
from tests.server.tool_answers import CHAT, CITY, PARIS, needs_grammars

RESPONSES = "/v1/responses"
PLAIN: dict[str, Any] = {"input": "hi", "max_output_tokens": 20, "temperature": 0}
TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "description": "Looks.", "parameters": CITY, "strict": None},
    {"type": "function", "name": "now", "parameters": None, "strict": False},
]
ASK: dict[str, Any] = {"input": "hi", "max_output_tokens": 200, "temperature": 0, "tools": TOOLS}


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [{**item, "id": None, "call_id": None} for item in response["output"]]
    return {**response, "output": output, "id": None, "created_at": None, "usage": response["usage"]["output_tokens"]}


def test_openais_client_gets_the_answer_of_the_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        max_tokens=20,
        temperature=0,
    )
    response = client.responses.create(
        model="tiny", instructions="Be brief.", input="hi", max_output_tokens=20, temperature=0, store=True
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert [(item.type, getattr(item, "status", None)) for item in response.output] == [("message", "incomplete")]
    usage = response.usage
    assert usage is not None
    assert (usage.output_tokens, usage.total_tokens) == (20, usage.input_tokens + 20)
    # All tokens but the last are in the cache since the chat.
    assert usage.input_tokens_details.cached_tokens == usage.input_tokens - 1
    assert response.model_dump()["store"] is False


def test_openais_client_counts_the_tokens_of_an_input(tool_client: openai.OpenAI) -> None:
    turns: list[Any] = [{"role": "user", "content": "hi"}, {"type": "reasoning", "summary": []}]
    asked: dict[str, Any] = {"model": "tiny", "instructions": "Be brief.", "input": turns, "tools": TOOLS}
    usage = tool_client.responses.create(**asked, max_output_tokens=1).usage
    assert usage is not None
    assert tool_client.responses.input_tokens.count(**asked).input_tokens == usage.input_tokens
    with pytest.raises(openai.BadRequestError) as refused:
        tool_client.responses.input_tokens.count(**asked | {"input": [{"role": "user", "content": 1}]})
    assert refused.value.param == "input[0].content"


def test_openais_client_streams_text_and_calls(tool_client: openai.OpenAI) -> None:
    with tool_client.responses.stream(model="tiny", input="hi", tools=TOOLS, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "I look."
    message, call = final.output
    assert (message.type, call.type) == ("message", "function_call")
    assert call.type == "function_call"
    assert (call.name, call.arguments, call.status) == ("get_weather", PARIS, "completed")
    assert final.status == "completed"
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 2


def test_the_events_make_the_whole_response(hermes: ServerProcess) -> None:
    whole = hermes.post(RESPONSES, ASK).json()
    events = named_events(hermes, RESPONSES, ASK)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    texts: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        elif event["type"] == "response.output_text.done":
            assert texts[event["item_id"]] == event["text"]
        elif event["type"] == "response.function_call_arguments.done":
            assert texts[event["item_id"]] == event["arguments"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert [item["id"] for item in done] == list(texts)


def test_calls_and_their_outputs_go_back(hermes: ServerProcess, tool_client: openai.OpenAI) -> None:
    first = tool_client.responses.create(model="tiny", input="hi", tools=TOOLS, temperature=0)
    call = first.output[-1]
    assert call.type == "function_call"
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    turns: list[Any] = [{"role": "user", "content": "hi"}, *first.output, output]
    called = {"id": call.call_id, "type": "function", "function": {"name": "get_weather", "arguments": PARIS}}
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
    ]
    usage = hermes.post(CHAT, {"messages": chat, "max_tokens": 1}).json()["usage"]
    again = tool_client.responses.create(model="tiny", input=turns, max_output_tokens=1).usage
    assert again is not None
    # The whole prompt of the chat is found in the cache, so the two prompts have the same tokens.
    assert (again.input_tokens, again.input_tokens_details.cached_tokens) == (
        usage["prompt_tokens"],
        usage["prompt_tokens"] - 1,
    )


@needs_grammars
def test_a_call_that_is_cut_off_is_incomplete(hermes: ServerProcess) -> None:
    seen = set()
    for max_tokens in range(10, 53, 3):
        for response in (
            hermes.post(RESPONSES, {**ASK, "max_output_tokens": max_tokens}).json(),
            named_events(hermes, RESPONSES, {**ASK, "max_output_tokens": max_tokens})[-1]["response"],
        ):
            item = response["output"][-1]
            is_whole = item["type"] == "function_call" and item["arguments"] == PARIS
            seen.add((response["status"], item["type"], item["status"]))
            assert item["status"] == "incomplete" or is_whole
    assert ("incomplete", "function_call", "incomplete") in seen


def test_a_limit_on_a_servers_tools_does_not_count_the_clients(tool_client: openai.OpenAI) -> None:
    limited, free = (
        tool_client.responses.create(model="tiny", input="hi", tools=TOOLS, temperature=0, max_tool_calls=limit)
        for limit in (1, None)
    )
    calls = [[item.type for item in response.output] for response in (limited, free)]
    assert calls[0] == calls[1] == ["message", "function_call"]
    assert (limited.max_tool_calls, free.max_tool_calls) == (1, None)


@needs_grammars
@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "now"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]},
    ],
)
def test_a_call_can_be_required(hermes: ServerProcess, choice: dict[str, Any]) -> None:
    response = hermes.post(RESPONSES, {**ASK, "tool_choice": choice, "parallel_tool_calls": False}).json()
    assert [(item["name"], item["arguments"]) for item in response["output"]] == [("now", "{}")]
    assert (response["status"], response["tool_choice"]) == ("completed", choice)


@needs_grammars
def test_an_output_has_the_form_of_its_schema(server: ServerProcess) -> None:
    form = {"type": "json_schema", "name": "letter", "schema": {"enum": ["a"]}, "strict": True}
    response = server.post(RESPONSES, {**PLAIN, "text": {"format": form}}).json()
    assert response["output"][0]["content"][0]["text"] == '"a"'
    assert response["text"] == {"format": form}


def item(**fields: Any) -> dict[str, Any]:
    return {"instructions": "Be brief.", "input": [{"role": "user", "content": "hi"}, fields]}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{}] * 4097}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"instructions": 1}, "instructions"),
        (item(content="hi"), "input[1].role"),
        (item(role="tool", content="hi"), "input[1].role"),
        (item(role="user"), "input[1].content"),
        (item(role="user", content=[{"type": "input_image", "image_url": "a"}]), "input[1].content[0].type"),
        (item(role="user", content=[{"type": "input_image"}]), "input[1].content[0].image_url"),
        (item(role="user", content=[{"type": "input_text"}]), "input[1].content[0].text"),
        (item(type="function_call", call_id="a", name="f"), "input[1].arguments"),
        (item(type="function_call", call_id="a", name="f", arguments="{"), "input[1].arguments"),
        (item(type="function_call", name="f", arguments="{}"), "input[1].call_id"),
        (item(type="function_call_output", call_id="a"), "input[1].output"),
        (item(type="item_reference", id="a"), "input[1].type"),
        (item(type="local_shell_call"), "input[1].type"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]}, "tools[0].parameters.type"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "0"}, "temperature"),
        ({"store": "yes"}, "store"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"max_tool_calls": "1"}, "max_tool_calls"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
    ],
)
def test_bad_input_is_a_400_that_names_it(hermes: ServerProcess, body: dict[str, Any], field: str) -> None:
    for more in ({}, {"stream": True}):
        response = hermes.post(RESPONSES, {**PLAIN, **body, **more})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == field
        assert error["message"].startswith(f"{field} ")


@pytest.mark.parametrize("field", ["metadata", "reasoning", "text"])
def test_what_an_answer_repeats_can_be_written(server: ServerProcess, field: str) -> None:
    body = f'{{"input": "hi", "{field}": {{"a": 1e999}}}}'
    response = server.http.post(RESPONSES, content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_what_is_not_stored_is_said(server: ServerProcess) -> None:
    error = server.post(RESPONSES, {**PLAIN, "previous_response_id": "resp_1"}).json()["error"]
    assert error["code"] == "unsupported_feature"
    assert "stores no responses" in error["message"]


def test_a_client_that_leaves_ends_its_request(server: ServerProcess) -> None:
    before = num_aborted(server)
    with send(server, RESPONSES, {**PLAIN, "max_output_tokens": 4000, "stream": True}):
        server.wait_until(lambda status: any(row["completion_tokens"] > 3 for row in status["requests"]))
    server.wait_until_idle()
    assert num_aborted(server) == before + 1


def test_an_input_may_be_a_text_and_the_error_says_so(hermes: ServerProcess) -> None:
    error = hermes.post("/v1/responses", {}).json()["error"]
    assert error["message"] == "input must be a string or a list of items, got None"
