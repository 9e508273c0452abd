"""Ollama's routes: lines, options, tools, forms, what is known of the model, and errors in its own form."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from tests.server.checkpoint import ANSWER
from tests.server.process import ServerProcess
from tests.server.test_disconnects import num_aborted, send
from tests.server.tool_answers import CHAT as OPENAI_CHAT
from tests.server.tool_answers import NOW, PARIS, WEATHER, needs_grammars

CHAT, GENERATE = "/api/chat", "/api/generate"
USER = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0, "num_predict": 20}
PLAIN: dict[str, Any] = {"model": "tiny", "messages": USER, "options": GREEDY}
ASK: dict[str, Any] = {"messages": USER, "tools": [WEATHER, NOW], "options": {"temperature": 0}}


def lines(server: ServerProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of a stream, which is the default; the last one, and no other, is done."""
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    found = [json.loads(line) for line in response.text.removesuffix("\n").split("\n")]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


def whole(server: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, {**body, "stream": False})
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_a_chat_is_answered_as_by_openais_route(server: ServerProcess) -> None:
    chat = server.post(OPENAI_CHAT, {"messages": USER, "temperature": 0, "max_tokens": 20}).json()
    text = chat["choices"][0]["message"]["content"]
    answer = whole(server, CHAT, PLAIN)
    assert answer["message"] == {"role": "assistant", "content": text}
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("tiny", True, "length")
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (chat["usage"]["prompt_tokens"], 20)
    durations = [answer[f"{name}_duration"] for name in ("prompt_eval", "eval", "total")]
    assert durations[0] > 0 < durations[1]
    assert durations[0] + durations[1] == durations[2]
    assert datetime.fromisoformat(answer["created_at"]).tzinfo is not None

    *parts, last = lines(server, CHAT, PLAIN)
    assert "".join(part["message"]["content"] for part in parts) == text
    assert last["message"] == {"role": "assistant", "content": ""}
    assert set(last) == set(answer)


# The routes that read a body.
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {**PLAIN, "stream": False},
    GENERATE: {"prompt": "hi", "stream": False, "options": GREEDY},
    "/api/show": {"model": "tiny"},
    "/api/embed": {"input": "hi"},
    "/api/embeddings": {"prompt": "hi"},
}
FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize("path", BODIES)
def test_a_program_may_leave_the_content_type_out_and_a_web_page_may_not(server: ServerProcess, path: str) -> None:
    raw = json.dumps(BODIES[path])
    for headers in ({}, {"content-type": FORM}, {"sec-fetch-site": "none"}, {"sec-fetch-site": "same-origin"}):
        response = server.http.post(path, content=raw, headers=headers)
        assert response.status_code == 200, (headers, response.text)
    own = {"origin": server.url}
    pages: list[dict[str, str]] = [{"origin": "https://evil.example"}, {"origin": "null"}, own]
    pages += [{"sec-fetch-site": value} for value in ("cross-site", "same-site", "unheard-of")]
    for headers in pages:
        for kind in ({}, {"content-type": FORM}, {"content-type": "text/plain"}):
            response = server.http.post(path, content=raw, headers={**headers, **kind})
            assert response.status_code == 415, (headers, kind, response.text)
            assert response.json()["error"].startswith("the content type must be application/json, got ")
    response = server.http.post(path, content=raw, headers={"content-type": "application/json", **own})
    assert response.status_code == 200


def test_a_prompt_is_a_conversation_or_as_it_is(server: ServerProcess) -> None:
    turns = [{"role": "system", "content": "Be brief."}, *USER]
    text = whole(server, CHAT, {**PLAIN, "messages": turns})["message"]["content"]
    body = {"model": "tiny:latest", "prompt": "hi", "system": "Be brief.", "options": GREEDY}
    answer = whole(server, GENERATE, body)
    assert (answer["response"], answer["done_reason"]) == (text, "length")
    assert "message" not in answer
    assert "".join(line["response"] for line in lines(server, GENERATE, body)) == text
    # Without a limit the output goes to its end, as long as the context is.
    raw = whole(server, GENERATE, {"prompt": "Q", "raw": True, "options": {"temperature": 0, "num_predict": -1}})
    assert (raw["response"], raw["done_reason"]) == (ANSWER, "stop")


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": []}), (CHAT, {}), (GENERATE, {"prompt": ""})])
def test_without_a_prompt_the_model_is_loaded_already(server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, {**body, "model": "tiny", "keep_alive": "5m"}).json()
    assert (answer["done"], answer["done_reason"]) == (True, "load")


def test_options_are_sampling_parameters(server: ServerProcess) -> None:
    sampled = {"temperature": 1.5, "seed": 7, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "max_tokens": 30}
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25, "stop": ["q"]}
    chat = server.post(OPENAI_CHAT, {"messages": USER, **sampled, **penalties}).json()
    options: dict[str, Any] = {**sampled, **penalties, "num_ctx": 2048, "repeat_last_n": -1, "mirostat": 0}
    options |= {"num_predict": options.pop("max_tokens"), "repeat_penalty": options.pop("repetition_penalty")}
    answer = whole(server, CHAT, {"messages": USER, "options": options})
    assert answer["message"]["content"] == chat["choices"][0]["message"]["content"]


def test_whole_numbers_may_be_floats_and_no_limit_is_below_one(server: ServerProcess) -> None:
    for options in ({"num_predict": 8, "top_k": 40, "seed": 7}, {"num_predict": 8.0, "top_k": 40.0, "seed": 7.0}):
        answer = whole(server, CHAT, {"messages": USER, "options": options})
        assert (answer["eval_count"], answer["done_reason"]) == (8, "length")
    for limit in (0, -1, -2, -2.0):
        body = {"prompt": "Q", "raw": True, "options": {"temperature": 0, "num_predict": limit}}
        assert whole(server, GENERATE, body)["response"] == ANSWER


@pytest.mark.parametrize("limit", [2.5, 2**31, "8", False, [], 1e300])
def test_a_refused_limit_is_told_what_is_allowed(server: ServerProcess, limit: Any) -> None:
    for path, body in (
        (CHAT, {"messages": USER}),
        (GENERATE, {"prompt": "Q"}),
        (GENERATE, {"prompt": "Q", "raw": True}),
    ):
        response = server.post(path, {**body, "options": {"num_predict": limit}})
        assert response.status_code == 400
        words = "options.num_predict must be an integer of at most 2147483647; one below 1 sets no limit, got "
        assert response.json()["error"].startswith(words)


def test_a_call_is_one_line_and_its_result_goes_back(hermes: ServerProcess) -> None:
    called = {"name": "get_weather", "arguments": json.loads(PARIS)}
    answer = whole(hermes, CHAT, ASK)
    assert answer["message"]["content"] == "I look."
    assert [call["function"] for call in answer["message"]["tool_calls"]] == [called]
    assert answer["done_reason"] == "stop"
    found = lines(hermes, CHAT, ASK)
    assert "".join(line["message"]["content"] for line in found) == "I look."
    calls = [call for line in found for call in line["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [called]

    result = {"role": "tool", "tool_name": "get_weather", "content": "rain"}
    for turn in (answer["message"], {**answer["message"], "tool_calls": [{"function": called}]}):
        again = whole(hermes, CHAT, {"messages": [*USER, turn, result], "options": {"num_predict": 1}})
        function = {"name": "get_weather", "arguments": PARIS}
        chat = [
            *USER,
            {"role": "assistant", "content": "I look.", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": "rain"},
        ]
        ids = hermes.post("/tokenize", {"messages": chat}).json()["tokens"]
        assert again["prompt_eval_count"] == len(ids)
        # The prompt of the chat is found in the cache but for its last token, so the two have the same tokens.
        usage = hermes.post(OPENAI_CHAT, {"messages": chat, "max_tokens": 1}).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == len(ids) - 1


def test_a_call_without_arguments_is_one_too(serve: Any) -> None:
    (_, call) = whole(serve("llama3"), CHAT, ASK)["message"]["tool_calls"]
    assert call["function"] == {"name": "now", "arguments": {}}


@needs_grammars
def test_an_output_has_a_form(server: ServerProcess) -> None:
    answer = whole(server, CHAT, {**PLAIN, "format": {"enum": ["a"]}})
    assert answer["message"]["content"] == '"a"'
    body = {"prompt": "Z", "raw": True, "format": {"enum": ["b"]}, "options": GREEDY}
    assert whole(server, GENERATE, body)["response"] == '"b"'
    assert whole(server, CHAT, {**PLAIN, "format": "json"})["message"]["content"].startswith("{")


def test_thinking_is_a_wish_that_a_template_may_know(hermes: ServerProcess, server: ServerProcess) -> None:
    for each, lengths in ((hermes, [0, len("no"), len("think"), len("think")]), (server, [0, 0, 0, 0])):
        body = {"messages": USER, "options": {"num_predict": 1}}
        counts = [
            whole(each, CHAT, {**body, "think": think})["prompt_eval_count"] for think in (None, False, True, "low")
        ]
        assert [count - counts[0] for count in counts] == lengths


def test_what_is_known_of_the_model(server: ServerProcess, hermes: ServerProcess) -> None:
    (model,) = server.http.get("/api/tags").json()["models"]
    assert (model["name"], model["model"]) == ("tiny", "tiny")
    assert datetime.fromisoformat(model["modified_at"]).tzinfo is not None
    assert server.http.get("/api/version").json() == server.http.get("/version").json()
    for name in ("model", "name"):
        shown = server.post("/api/show", {name: "tiny:latest"}).json()
        assert shown["capabilities"] == ["completion", "embedding"]
        assert "message.role" in shown["template"]
        architecture = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{architecture}.context_length"] == 4096
    assert hermes.post("/api/show", {"model": "tiny"}).json()["capabilities"] == ["completion", "tools", "embedding"]
    assert server.http.post("/api/embed", json={"model": "tiny", "input": "a"}).json()["embeddings"]
    (running,) = server.http.get("/api/ps").json()["models"]
    # Clients convert the time to their own zone.
    assert datetime.fromisoformat(running.pop("expires_at")).astimezone(timezone(timedelta(hours=14))).year == 9000
    assert running == {"name": "tiny", "model": "tiny", "details": {}, "context_length": 4096, "size_vram": 0}
    assert server.post("/api/show", {}).json() == {"error": "model must be a string, got None"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": USER * 4097}, "messages"),
        (CHAT, {"messages": ["hi"]}, "messages[0]"),
        (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": "hi", "images": ["aGk="]}]}, "messages[0].images"),
        (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": {"a": 1}}]}, "messages[0].tool_calls"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT, {"messages": USER, "format": "xml"}, "format"),
        (CHAT, {"messages": USER, "think": 1}, "think"),
        (CHAT, {"messages": USER, "stream": 1}, "stream"),
        (CHAT, {"messages": USER, "logprobs": True}, "logprobs"),
        (CHAT, {"messages": USER, "options": []}, "options"),
        (CHAT, {"messages": [{"role": "assistant", "content": "a", "thinking": 1}]}, "messages[0].thinking"),
        (CHAT, {"messages": [{"role": "tool", "content": "a", "tool_name": 1}]}, "messages[0].tool_name"),
        (CHAT, {"messages": USER, "options": {"temperature": "0"}}, "options.temperature"),
        (CHAT, {"messages": USER, "think": "foo"}, "think"),
        (CHAT, {"messages": USER, "options": {"num_predict": 8.5}}, "options.num_predict"),
        (CHAT, {"messages": USER, "options": {"num_predict": False}}, "options.num_predict"),
        (CHAT, {"messages": USER, "options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        (CHAT, {"messages": USER, "options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n"),
        (CHAT, {"messages": USER, "options": {"mirostat": 1}}, "options.mirostat"),
        (GENERATE, {"prompt": 1}, "prompt"),
        (GENERATE, {"prompt": "hi" * 5000}, "prompt"),
        (GENERATE, {"prompt": "hi", "images": ["aGk="]}, "images"),
        (GENERATE, {"prompt": "hi", "suffix": "there"}, "suffix"),
        (GENERATE, {"prompt": "hi", "context": [1]}, "context"),
        (GENERATE, {"prompt": "hi", "template": "{{ .Prompt }}"}, "template"),
        (GENERATE, {"prompt": "hi", "raw": True, "options": {"num_predict": "0"}}, "options.num_predict"),
    ],
)
def test_bad_input_is_an_error_in_ollamas_form(
    hermes: ServerProcess, path: str, body: dict[str, Any], field: str
) -> None:
    for more in ({}, {"stream": False}):
        response = hermes.post(path, {**more, **body})
        assert response.status_code == 400, response.text
        (message,) = response.json().values()
        assert list(response.json()) == ["error"]
        assert message.startswith(f"{field} ") or (field == "prompt" and "the prompt has" in message)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("POST", CHAT, 404), ("POST", "/api/pull", 404), ("GET", CHAT, 405)]
)
def test_every_status_has_ollamas_form(server: ServerProcess, method: str, path: str, status: int) -> None:
    response = server.http.request(method, path, json={**PLAIN, "model": "other"})
    assert response.status_code == status
    assert isinstance(response.json()["error"], str)


def test_a_client_that_leaves_ends_its_request(narrow_server: ServerProcess) -> None:
    before = num_aborted(narrow_server)
    # Greedily, the model's saying has no end; a sample may end at once.
    with send(narrow_server, CHAT, {**PLAIN, "options": {**GREEDY, "num_predict": 4000}}):
        narrow_server.wait_until(lambda status: status["requests"] and status["requests"][0]["completion_tokens"] > 3)
        # One sequence runs at a time, so this one is silent; a line of nothing would be no JSON.
        with send(narrow_server, CHAT, PLAIN) as waiting:
            waiting.settimeout(0.2)
            with pytest.raises(TimeoutError):
                waiting.recv(1)
    narrow_server.wait_until_idle()
    assert num_aborted(narrow_server) == before + 2
