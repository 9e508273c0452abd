"""Calls that `max_tokens` or a stop string truncates, over every protocol: whole answers and streams agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.server import test_anthropic_messages, test_ollama, test_responses
from tests.server.process import ServerProcess
from tests.server.streams import named_events, stream, text_of
from tests.server.tool_answers import (
    ASK,
    CHAT,
    PARIS,
    Serve,
    ask,
    joined,
    names_and_arguments,
    needs_grammars,
    reasons,
)
from tests.server.tool_checkpoint import BARE, REQUIRED_FORMS

pytestmark = needs_grammars

Calls = list[tuple[str, str]]


def of_chat(server: ServerProcess, **more: Any) -> tuple[str, Calls, str]:
    """Return the content, the calls and the finish reason of a chat, for which the stream has the same."""
    choice = ask(server, **more)
    content, calls = choice["message"]["content"] or "", names_and_arguments(choice["message"].get("tool_calls", []))
    _, chunks = stream(server, CHAT, {**ASK, **more})
    assert (text_of(chunks), names_and_arguments(joined(chunks))) == (content, calls)
    assert reasons(chunks) == [choice["finish_reason"]]
    return content, calls, choice["finish_reason"]


def length_of(server: ServerProcess, **more: Any) -> int:
    return len(ask(server, return_token_ids=True, **more)["token_ids"])


@pytest.mark.parametrize("form", REQUIRED_FORMS)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_chat_has_no_part_of_a_call_in_its_content(serve: Serve, form: str, choice: str) -> None:
    server, more = serve(form), {"tool_choice": choice, "parallel_tool_calls": False}
    seen = []
    for max_tokens in range(1, min(length_of(server, **more), 60)):
        content, calls, reason = of_chat(server, **more, max_tokens=max_tokens)
        assert reason == "length"
        if choice == "required":
            assert content == ""
        elif form in BARE:
            # Only the name of a function tells its call from other JSON.
            assert not calls or content == ""
            assert "get_weather" not in content
        else:
            assert "I look.".startswith(content.rstrip("\n"))
        assert all(name in ("get_weather", "now") for name, _ in calls)
        seen += calls
    assert len(set(seen)) >= 2


def test_a_call_is_told_from_its_name_on(hermes: ServerProcess) -> None:
    more = {"tool_choice": "required", "parallel_tool_calls": False}
    found = [of_chat(hermes, **more, max_tokens=most)[1] for most in range(1, length_of(hermes, **more))]
    first = next(calls for calls in found if calls)
    assert found[0] == []
    assert first == [("get_weather", "")]
    assert ("get_weather", PARIS) in [call for calls in found for call in calls]


@pytest.mark.parametrize(("stop", "calls"), [("get_", []), ('"argum', [("get_weather", "")])])
def test_a_stop_string_truncates_a_call_too(hermes: ServerProcess, stop: str, calls: Calls) -> None:
    for choice, content in (("auto", "I look."), ("required", "")):
        more: dict[str, Any] = {"tool_choice": choice, "stop": [stop]}
        assert of_chat(hermes, **more) == (content, calls, "stop")
    # The messages of Anthropic name the sequence, and leave the call out.
    body = {**test_anthropic_messages.ASK, "stop_sequences": [stop]}
    whole = hermes.post(test_anthropic_messages.MESSAGES, body).json()
    assert whole["content"] == [{"type": "text", "text": "I look."}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", stop)
    events = named_events(hermes, test_anthropic_messages.MESSAGES, body)
    assert test_anthropic_messages.joined(events)["content"] == whole["content"]


def test_messages_leave_it_out(hermes: ServerProcess) -> None:
    path, body = test_anthropic_messages.MESSAGES, test_anthropic_messages.ASK
    for choice, text in (("auto", [{"type": "text", "text": "I look."}]), ("any", [])):
        more: Mapping[str, Any] = {"tool_choice": {"type": choice, "disable_parallel_tool_use": True}}
        num_tokens = hermes.post(path, {**body, **more}).json()["usage"]["output_tokens"]
        for max_tokens in range(1 if choice == "any" else 10, num_tokens):
            given = {**body, **more, "max_tokens": max_tokens}
            whole = hermes.post(path, given).json()
            assert whole["stop_reason"] == "max_tokens"
            blocks = [block for block in whole["content"] if block["type"] == "tool_use"]
            assert [block for block in whole["content"] if block["type"] == "text"] == text
            assert all(block["input"] == {"city": "Paris"} for block in blocks)
            events = named_events(hermes, path, given)
            starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
            parts = [event["delta"] for event in events if event["type"] == "content_block_delta"]
            assert "".join(part.get("text", "") for part in parts) == "".join(block["text"] for block in text)
            # A stream cannot take a block of arguments back that it has begun.
            arguments = "".join(part.get("partial_json", "") for part in parts)
            assert PARIS.startswith(arguments)
            assert [start["type"] for start in starts] == ["text"] * len(text) + ["tool_use"] * bool(arguments)
            assert bool(blocks) <= (arguments == PARIS)


def test_responses_have_an_incomplete_item(hermes: ServerProcess) -> None:
    path, body = test_responses.RESPONSES, test_responses.ASK
    for choice, types in (("auto", ["message"]), ("required", [])):
        more: Mapping[str, Any] = {"tool_choice": choice, "parallel_tool_calls": False}
        num_tokens = hermes.post(path, {**body, **more}).json()["usage"]["output_tokens"]
        seen = set()
        for max_tokens in range(1 if choice == "required" else 10, num_tokens):
            given = {**body, **more, "max_output_tokens": max_tokens}
            whole = hermes.post(path, given).json()
            events = named_events(hermes, path, given)
            assert test_responses.without_ids(events[-1]["response"]) == test_responses.without_ids(whole)
            assert whole["status"] == "incomplete"
            calls = [item for item in whole["output"] if item["type"] == "function_call"]
            assert [item["type"] for item in whole["output"]] == [*types, *(["function_call"] * len(calls))]
            for item in whole["output"][: len(types)]:
                assert item["content"][0]["text"] == "I look."
            for call in calls:
                assert PARIS.startswith(call["arguments"])
                assert call["status"] == ("completed" if call["arguments"] == PARIS else "incomplete")
                seen.add(call["arguments"])
        assert {"", PARIS} < seen


def test_ollama_leaves_it_out(hermes: ServerProcess) -> None:
    path, body = test_ollama.CHAT, test_ollama.ASK
    num_tokens = test_ollama.whole(hermes, path, body)["eval_count"]
    for max_tokens in range(10, num_tokens):
        given = {**body, "options": {"temperature": 0, "num_predict": max_tokens}}
        whole = test_ollama.whole(hermes, path, given)
        assert (whole["message"]["content"], whole["done_reason"]) == ("I look.", "length")
        calls = [call["function"] for call in whole["message"].get("tool_calls", ())]
        assert calls in ([], [{"name": "get_weather", "arguments": {"city": "Paris"}}])
        parts = [line["message"] for line in test_ollama.lines(hermes, path, given)]
        assert "".join(part["content"] for part in parts) == "I look."
        assert [call["function"] for part in parts for call in part.get("tool_calls", ())] == calls
