"""Behaviours of streams, on the wire."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server import raw
from tests.server.checkpoint import SAYING
from tests.server.process import ServerProcess
from tests.server.streams import events_of, stream, text_of

GREEDY = {"temperature": 0, "max_tokens": 30}
CHAT = {"messages": [{"role": "user", "content": "hi"}], **GREEDY}
ROUTES = [("/v1/completions", {"prompt": "Z", **GREEDY}), ("/v1/chat/completions", CHAT)]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_last_chunk_has_usage_and_no_choices(server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    _, chunks = stream(server, path, {**body, "stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 30
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    _, chunks = stream(server, path, body)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_stream_options_without_a_stream_are_refused(server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    response = server.post(path, {**body, "stream_options": {"include_usage": True}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"


def test_continuous_usage_needs_usage_at_the_end(server: ServerProcess) -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    _, chunks = stream(server, "/v1/chat/completions", {**CHAT, "stream_options": both})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-2:] == [30, 30]
    refused = server.post(
        "/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {**both, "include_usage": False}}
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "stream_options.continuous_usage_stats"


def test_the_role_comes_once_and_first(server: ServerProcess) -> None:
    _, chunks = stream(server, "/v1/chat/completions", {**CHAT, "n": 2, "temperature": 1})
    for index in (0, 1):
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert all(set(delta) == {"content"} and delta["content"] for delta in deltas[1:-1])
        assert deltas[-1] == {}


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_id_model_and_created_stay_the_same_in_a_stream(server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    response, chunks = stream(server, path, {**body, "stream_options": {"include_usage": True}})
    heads = {(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks}
    assert len(heads) == 1
    assert chunks[0]["id"].endswith(response.headers["x-request-id"])


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_one_standard_finish_reason_ends_each_choice(server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    _, chunks = stream(server, path, {**body, "n": 2, "temperature": 1.0, "ignore_eos": True})
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_the_end_of_the_last_choice_and_of_the_stream_are_one_write(
    server: ServerProcess, path: str, body: dict[str, Any]
) -> None:
    wanted = {**body, "stream": True, "n": 2, "stream_options": {"include_usage": True}, "ignore_eos": True}
    answer = raw.ask(server, raw.post(path, wanted, "Connection: close"))
    *_, last, end = answer.partition(b"\r\n\r\n")[2].split(b"\r\n")[1::2]
    assert last.endswith(b"data: [DONE]\n\n")
    events = [json.loads(event[6:]) for event in last.decode().split("\n\n")[:-2]]
    assert any(choice["finish_reason"] == "length" for choice in events[-2]["choices"])
    assert events[-1]["usage"]["completion_tokens"] == 60
    assert end == b""


def test_a_stop_string_across_chunks_is_held_back(server: ServerProcess) -> None:
    body = {"prompt": "Z", **GREEDY}
    # "j\u00e9 w" is spread over four tokens; "fg\u2014" begins twice and never comes; "nX" is pending at the end.
    _, chunks = stream(server, "/v1/completions", {**body, "stop": ["j\u00e9 w", "fg\u2014"]})
    assert text_of(chunks) == SAYING.partition("j\u00e9 w")[0]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["stop_reason"] == "j\u00e9 w"
    whole = server.post("/v1/completions", {**body, "stop": ["j\u00e9 w"]}).json()
    assert whole["choices"][0]["text"] == text_of(chunks)
    _, chunks = stream(server, "/v1/completions", {**body, "max_tokens": 7, "stop": ["fgX"]})
    assert text_of(chunks) == "abcdefg"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_a_stop_inside_a_token_cuts_it_and_the_earliest_wins(server: ServerProcess) -> None:
    body = {"prompt": "Z", **GREEDY, "stop": ["ld", "orl", "k"]}
    _, chunks = stream(server, "/v1/completions", body)
    assert text_of(chunks) == SAYING.partition("orl")[0]
    assert chunks[-1]["choices"][0]["stop_reason"] == "orl"
    _, chunks = stream(server, "/v1/completions", {**body, "include_stop_str_in_output": True})
    assert text_of(chunks) == SAYING.partition("orl")[0] + "orl"


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_characters_of_several_tokens_arrive_whole(server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    _, chunks = stream(server, path, {**body, "max_tokens": 28, "return_token_ids": True})
    pieces = [
        choice.get("text", choice.get("delta", {}).get("content")) for chunk in chunks for choice in chunk["choices"]
    ]
    assert "".join(piece or "" for piece in pieces) == SAYING + "abcdef"
    assert any("\U0001f984" in (piece or "") for piece in pieces)
    # No token is missing, also none of those that showed nothing yet.
    assert sum(len(choice.get("token_ids", [])) for chunk in chunks for choice in chunk["choices"]) == 28


def test_samples_of_several_prompts_carry_their_index(server: ServerProcess) -> None:
    body = {"prompt": ["Z", "aZ", "Q"], "n": 2, "best_of": 2, "temperature": 0, "max_tokens": 5}
    _, chunks = stream(server, "/v1/completions", body)
    texts = [text_of(chunks, index) for index in range(6)]
    assert texts == ["abcde", "abcde", "abcde", "abcde", "xyz", "xyz"]
    whole = server.post("/v1/completions", body).json()
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == list(enumerate(texts))


def test_frames_and_headers_are_server_sent_events(server: ServerProcess) -> None:
    response = server.post("/v1/chat/completions", {**CHAT, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    events = events_of(response.text)
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    assert all(isinstance(json.loads(event), dict) for event in events[:-1])


def test_chunks_are_sent_as_they_are_made(server: ServerProcess) -> None:
    body = {"prompt": "Z", "stream": True, "max_tokens": 2000, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        (request,) = server.status()["requests"]
        assert request["completion_tokens"] < 2000


def test_a_waiting_stream_is_kept_open_by_comments(narrow_server: ServerProcess) -> None:
    busy = {"prompt": "Z", "stream": True, "max_tokens": 2000, "ignore_eos": True}
    with narrow_server.http.stream("POST", "/v1/completions", json=busy) as running:
        lines = running.iter_lines()
        while not next(lines).startswith("data: {"):
            pass
        body = {"prompt": "Z", "stream": True, "max_tokens": 3, "temperature": 0}
        with narrow_server.http.stream("POST", "/v1/completions", json=body) as waiting:
            waiting_lines = waiting.iter_lines()
            assert [next(waiting_lines) for _ in range(4)] == [": ping", "", ": ping", ""]
            running.close()
            rest = [line for line in waiting_lines if line and line != ": ping"]
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in rest[:-1]) == "abc"
    assert rest[-1] == "data: [DONE]"


def test_the_openai_client_reads_both_streams(client: openai.OpenAI) -> None:
    create: Any = client.completions.create
    create_chat: Any = client.chat.completions.create
    with create(model="tiny", prompt="Z", stream=True, **GREEDY) as completion:
        assert "".join(chunk.choices[0].text for chunk in completion).startswith(SAYING)
    options = {"include_usage": True}
    with create_chat(model="tiny", stream=True, stream_options=options, **CHAT) as chat:
        chunks = list(chat)
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert said.startswith(SAYING)
    assert chunks[-1].usage.completion_tokens == 30
