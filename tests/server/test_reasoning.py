"""Reasoning over the chat endpoint: a model that thinks before it answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from quire.server.protocols.anthropic_messages import read_chat_fields
from quire.server.requests.fields import Fields
from quire.server.settings import REASONING_PARSERS
from quire.text.reasoning import REASONING_FORMATS
from tests.server import reasoning_checkpoint
from tests.server.process import PATIENCE_S, ServerProcess, running
from tests.server.streams import named_events, stream, text_of
from tests.server.tool_answers import CHAT, PARIS, USER, WEATHER, joined, names_and_arguments, needs_grammars

ASK: dict[str, Any] = {"messages": USER, "temperature": 0, "max_tokens": 100}
THOUGHT, YES = "Hm, so it is", "Yes!"
FLAGS = ("--num-kv-blocks", "400", "--max-num-seqs", "8")


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of a model with think tags, which has been started with the default format."""
    folder = reasoning_checkpoint.save(tmp_path_factory.mktemp("models") / "think", "think")
    with running(folder, tmp_path_factory.mktemp("logs") / "think.log", *FLAGS) as process:
        yield process


def ask(server: ServerProcess, **more: Any) -> dict[str, Any]:
    """Return an answer with one choice."""
    response = server.post(CHAT, {**ASK, **more})
    assert response.status_code == 200, response.text
    return dict(response.json())


def message(server: ServerProcess, **more: Any) -> dict[str, Any]:
    (choice,) = ask(server, **more)["choices"]
    return dict(choice["message"])


def reasoning_of(chunks: list[dict[str, Any]], index: int = 0, name: str = "reasoning") -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get(name, "") for choice in choices)


def prompt(server: ServerProcess, **more: Any) -> str:
    ids = server.post("/tokenize", {"messages": USER, **more}).json()["tokens"]
    return str(server.post("/detokenize", {"tokens": ids}).json()["prompt"])


def test_the_options_are_the_formats() -> None:
    assert {*REASONING_PARSERS} == {"auto", "none", *REASONING_FORMATS}


def test_thinking_is_reasoning_and_the_answer_is_content(thinker: ServerProcess) -> None:
    answer = ask(thinker)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "refusal": None, "content": YES, "reasoning": THOUGHT}
    assert choice["finish_reason"] == "stop"
    # Its tokens are the tags, three of the thought, two of the answer, and the end.
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert "Reasoning: read in the format think, with which the chat template begins answers" in thinker.log.read_text()
    (card,) = thinker.http.get("/v1/models").json()["data"]
    assert card["reasoning_parser"] == "think"
    assert "thinking" in thinker.post("/api/show", {"model": card["id"]}).json()["capabilities"]


def test_streams_have_reasoning_first(thinker: ServerProcess) -> None:
    more = {"n": 2, "logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    _, chunks = stream(thinker, CHAT, {**ASK, **more})
    for index in (0, 1):
        assert (reasoning_of(chunks, index), text_of(chunks, index)) == (THOUGHT, YES)
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        kinds = [key for choice in mine for key in choice["delta"] if choice["delta"][key] and key != "role"]
        assert kinds == sorted(kinds, reverse=True)
        assert sum(len(choice.get("token_ids") or ()) for choice in mine) == 8
        assert sum(len((choice["logprobs"] or {}).get("content", ())) for choice in mine) == 8
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}


def test_openais_client_reads_reasoning(thinker: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id, messages=USER, temperature=0, reasoning_effort="high"  # type: ignore[call-overload]
        )  # fmt: skip
    assert answer.choices[0].message.content == YES
    assert answer.choices[0].message.reasoning == THOUGHT
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3


def test_reasoning_that_is_not_wanted_is_left_out(thinker: ServerProcess) -> None:
    answer = ask(thinker, include_reasoning=False)
    assert answer["choices"][0]["message"] == {"role": "assistant", "refusal": None, "content": YES}
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    _, chunks = stream(thinker, CHAT, {**ASK, "include_reasoning": False})
    assert (reasoning_of(chunks), text_of(chunks)) == ("", YES)


def test_the_prompt_decides_whether_the_output_begins_inside_thinking(thinker: ServerProcess) -> None:
    opened = {"chat_template_kwargs": {"opens": True}}
    assert prompt(thinker, **opened).endswith("<|assistant|><think>")
    assert message(thinker, **opened)["reasoning"] == THOUGHT
    _, chunks = stream(thinker, CHAT, {**ASK, **opened})
    assert (reasoning_of(chunks), text_of(chunks)) == (THOUGHT, YES)
    for closed in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        assert prompt(thinker, **closed).endswith("<think></think>")
        assert message(thinker, **closed) == {"role": "assistant", "refusal": None, "content": YES, "reasoning": None}
    # A user who writes a tag opens nothing.
    said = [{"role": "user", "content": "<think>"}]
    styled = message(thinker, messages=said, chat_template_kwargs={"style": "Q"})
    assert (styled["reasoning"], styled["content"]) == (None, "xyz")


def test_thinking_that_is_cut_off_has_no_content(thinker: ServerProcess) -> None:
    for max_tokens in range(1, 5):
        cut = message(thinker, max_tokens=max_tokens)
        assert THOUGHT.startswith(cut["reasoning"] or "")
        assert not cut["content"]
        _, chunks = stream(thinker, CHAT, {**ASK, "max_tokens": max_tokens})
        assert (reasoning_of(chunks), text_of(chunks)) == (cut["reasoning"] or "", "")


def test_efforts_and_switches_reach_the_template(thinker: ServerProcess) -> None:
    for effort in ("minimal", "low", "medium", "high", "xhigh", "max"):
        assert prompt(thinker, reasoning_effort=effort).endswith("<|assistant|>")
    both = {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}
    assert prompt(thinker, **both).endswith("<think></think>")
    assert thinker.post(CHAT, {**ASK, "reasoning_effort": "huge"}).json()["error"]["param"] == "reasoning_effort"


def test_switches_that_the_template_lacks_are_warned_of_once(thinker: ServerProcess) -> None:
    for _ in range(3):
        assert message(thinker, chat_template_kwargs={"no_such_switch": 1, "self": 2})["content"] == YES
    log = thinker.log.read_text()
    assert log.count("does not use 'no_such_switch'") == log.count("does not use 'self'") == 1
    assert "'reasoning_effort'" not in log


def test_an_effort_of_anthropics_clients_is_the_templates_and_no_switch(thinker: ServerProcess) -> None:
    def tokens_of(**more: Any) -> list[int]:
        body = {"messages": USER, "max_tokens": 1, **more}
        answer = thinker.post("/prompt_tokens", {"path": "/v1/messages", "body": body})
        assert answer.status_code == 200, answer.text
        return list(answer.json()["tokens"])

    off, effort = {"thinking": {"type": "disabled"}}, {"output_config": {"effort": "high"}}
    assert tokens_of(**effort) == tokens_of() != tokens_of(**off) == tokens_of(**off, **effort)
    state: Any = None
    body = {"messages": USER, "max_tokens": 1, **effort}
    assert read_chat_fields(state, Fields(body))["chat_template_kwargs"] == {"reasoning_effort": "high"}
    refused = thinker.post("/v1/messages", {**body, "output_config": {"effort": "none"}})
    assert refused.json()["error"]["message"].startswith("output_config.effort must be one of low, medium, high")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_earlier_reasoning_reaches_the_template(thinker: ServerProcess, name: str) -> None:
    turns = [*USER, {"role": "assistant", "content": "Yes", name: "why"}, *USER]
    assert "<|assistant|>[why|why]Yes<|eos|>" in prompt(thinker, messages=turns)
    turns[1][name] = 1  # type: ignore[assignment]
    error = thinker.post(CHAT, {**ASK, "messages": turns}).json()["error"]
    assert error["code"] == "invalid_parameter"
    assert error["param"] == f"messages[1].{name}"


def test_a_budget_ends_thinking(thinker: ServerProcess) -> None:
    for budget in range(4):
        answer = ask(thinker, thinking_token_budget=budget)
        thought = "".join(reasoning_checkpoint.THOUGHT[:budget])
        assert answer["choices"][0]["message"]["reasoning"] == (thought or None)
        assert answer["choices"][0]["message"]["content"] == YES
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": budget}
    for bad in (-1, "1", True):
        error = thinker.post(CHAT, {**ASK, "thinking_token_budget": bad}).json()["error"]
        assert error["param"] == "thinking_token_budget"


@needs_grammars
def test_a_form_holds_from_the_end_of_thinking_on(thinker: ServerProcess) -> None:
    form = {"structured_outputs": {"choice": ["never", "no"]}}
    for more in ({}, {"chat_template_kwargs": {"opens": True}}, {"thinking_token_budget": 1}):
        answer = message(thinker, **form, **more)
        assert answer["reasoning"] == ("Hm" if "thinking_token_budget" in more else THOUGHT)
        assert answer["content"] in ("never", "no")
    assert message(thinker, **form, reasoning_effort="none")["content"] in ("never", "no")


@needs_grammars
def test_calls_come_after_thinking(thinker: ServerProcess) -> None:
    tools = {"tools": [WEATHER], "tool_choice": "required"}
    answer = message(thinker, **tools)
    assert (answer["reasoning"], answer["content"]) == (THOUGHT, None)
    assert names_and_arguments(answer["tool_calls"]) == [("get_weather", PARIS)]
    _, chunks = stream(thinker, CHAT, {**ASK, **tools})
    assert (reasoning_of(chunks), text_of(chunks)) == (THOUGHT, "")
    assert names_and_arguments(joined(chunks)) == [("get_weather", PARIS)]
    plain = message(thinker, tools=[WEATHER])
    assert (plain["reasoning"], plain["content"]) == (THOUGHT, YES)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gemma4", "harmony"])
def test_other_formats(tmp_path: Path, form: str) -> None:
    folder = reasoning_checkpoint.save(tmp_path / form, form)
    with running(folder, tmp_path / "log", *FLAGS, "--reasoning-content") as server:
        budget = {"thinking_token_budget": 2, "max_tokens": 14 if form == "harmony" else 100}
        answer = ask(server, **budget)
        (choice,) = answer["choices"]
        assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"]
        # Gemma's header is a token of thinking.
        assert choice["message"]["reasoning"] == ("Hm" if form == "gemma4" else "Hm, so")
        assert choice["message"]["content"] == (YES if form == "gemma4" else THOUGHT)
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
        _, chunks = stream(server, CHAT, {**ASK, **budget})
        assert reasoning_of(chunks) == reasoning_of(chunks, name="reasoning_content") == choice["message"]["reasoning"]
        assert text_of(chunks) == choice["message"]["content"]
        closed = message(server, reasoning_effort="none", max_tokens=3)
        assert (closed["reasoning"], closed["content"]) == (None, YES if form == "gemma4" else THOUGHT)


@pytest.mark.slow
def test_without_a_format_thinking_is_content(tmp_path: Path) -> None:
    folder = reasoning_checkpoint.save(tmp_path / "think", "think")
    with running(folder, tmp_path / "log", *FLAGS, "--reasoning-parser", "none") as server:
        whole = {"role": "assistant", "refusal": None, "content": f"<think>{THOUGHT}</think>{YES}"}
        assert message(server) == whole
        error = server.post(CHAT, {**ASK, "thinking_token_budget": 3}).json()["error"]
        assert (error["param"], error["code"]) == ("thinking_token_budget", "unsupported_feature")


def test_messages_have_a_thinking_block(thinker: ServerProcess) -> None:
    body = {"messages": USER, "temperature": 0, "max_tokens": 100}
    answer = thinker.post("/v1/messages", body).json()
    thinking = {"type": "thinking", "thinking": THOUGHT, "signature": ""}
    assert answer["content"] == [thinking, {"type": "text", "text": YES}]
    assert answer["stop_reason"] == "end_turn"
    events = named_events(thinker, "/v1/messages", body)
    begun = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert begun == ["thinking", "text"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert [delta["type"] for delta in deltas].count("signature_delta") == 1
    assert events[-2]["usage"]["output_tokens_details"] == answer["usage"]["output_tokens_details"]
    assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": 3}
    assert "".join(delta.get("thinking", "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("text", "") for delta in deltas) == YES
    # The answer goes back as it is; what the template makes of earlier thinking is its own affair.
    turns = [*USER, {"role": "assistant", "content": answer["content"]}, *USER]
    assert thinker.post("/v1/messages", {**body, "messages": turns}).status_code == 200


def test_a_budget_of_messages_ends_thinking(thinker: ServerProcess) -> None:
    import anthropic  # it takes seconds, and each process of the tests imports this module

    with anthropic.Anthropic(base_url=thinker.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": USER, "extra_body": {"temperature": 0}}
        with client.messages.stream(**asked, thinking={"type": "enabled", "budget_tokens": 1}) as events:
            final = events.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text"]
        assert final.content[0].type == "thinking"
        assert THOUGHT.startswith(final.content[0].thinking)
        assert final.usage.output_tokens_details is not None
        assert final.usage.output_tokens_details.thinking_tokens == 1
        hidden = client.messages.create(**asked, thinking={"type": "adaptive", "display": "omitted"})
        assert [block.type for block in hidden.content] == ["text"]


@pytest.mark.parametrize(
    ("thinking", "field"),
    [
        ({"type": "on"}, "thinking.type"),
        ({"type": "enabled", "budget_tokens": -1}, "thinking.budget_tokens"),
        ({"type": "enabled", "budget_tokens": "many"}, "thinking.budget_tokens"),
        ({"type": "enabled", "budget_tokens": 5, "display": "never"}, "thinking.display"),
    ],
)
def test_bad_thinking_is_named(thinker: ServerProcess, thinking: dict[str, Any], field: str) -> None:
    answer = thinker.post("/v1/messages", {"messages": USER, "max_tokens": 9, "thinking": thinking})
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


def test_responses_have_items_of_reasoning(thinker: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{thinker.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        asked: dict[str, Any] = {"model": "tiny", "input": "hi", "temperature": 0, "max_output_tokens": 100}
        with client.responses.stream(**asked) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
        whole = client.responses.create(**asked)
        for response in (whole, streamed):
            thought, said = response.output
            assert thought.type == "reasoning"
            assert thought.content is not None
            assert [part.text for part in thought.content] == [THOUGHT]
            assert (thought.summary, thought.status) == ([], "completed")
            assert said.type == "message"
            assert response.output_text == YES
            assert response.usage is not None
            assert response.usage.output_tokens_details.reasoning_tokens == 3
        texts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        (done,) = [event for event in events if event.type == "response.reasoning_text.done"]
        assert "".join(texts) == done.text == THOUGHT
        assert [event.sequence_number for event in events] == list(range(len(events)))
        # The items go back as they came.
        back: Any = [{"role": "user", "content": "hi"}, *whole.output, {"role": "user", "content": "hi"}]
        assert client.responses.create(**{**asked, "input": back}).output_text == YES


@pytest.mark.parametrize(
    "item",
    [
        {"content": [{"type": "reasoning_text", "text": "Why?"}], "summary": []},
        {"summary": [{"type": "summary_text", "text": "Why?"}], "content": None},
    ],
)
def test_reasoning_goes_back_into_the_prompt(thinker: ServerProcess, item: dict[str, Any]) -> None:
    def prompt_tokens(*items: dict[str, Any]) -> int:
        said = {"role": "assistant", "content": "Yes"}
        turns = [{"role": "user", "content": "hi"}, *items, said, {"role": "user", "content": "hi"}]
        answer = thinker.post("/v1/responses", {"input": turns, "max_output_tokens": 1})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["input_tokens"])

    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Yes", "reasoning": "Why?"}]
    messages.append({"role": "user", "content": "hi"})
    expected = thinker.post("/tokenize", {"messages": messages}).json()["count"]
    assert prompt_tokens({"type": "reasoning", "id": "rs_1", **item}) == expected > prompt_tokens()


def test_an_effort_of_responses_switches_thinking(thinker: ServerProcess) -> None:
    body = {"input": "hi", "temperature": 0, "max_output_tokens": 100}
    answer = thinker.post("/v1/responses", {**body, "reasoning": {"effort": "none"}}).json()
    assert [item["type"] for item in answer["output"]] == ["message"]
    error = thinker.post("/v1/responses", {**body, "reasoning": {"effort": "great"}}).json()["error"]
    assert error["param"] == "reasoning.effort"


@pytest.mark.parametrize(("path", "body"), [("/api/chat", {"messages": USER}), ("/api/generate", {"prompt": "hi"})])
def test_ollamas_answers_have_a_field_of_thinking(thinker: ServerProcess, path: str, body: dict[str, Any]) -> None:
    body = {**body, "options": {"temperature": 0, "num_predict": 100}}
    lines = [json.loads(line) for line in thinker.post(path, body).text.splitlines()]
    for answers in (lines, [thinker.post(path, {**body, "stream": False}).json()]):
        parts = [answer.get("message", answer) for answer in answers]
        assert "".join(part.get("thinking", "") for part in parts) == THOUGHT
        assert "".join(part.get("content", part.get("response", "")) for part in parts) == YES
