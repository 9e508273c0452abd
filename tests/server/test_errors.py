"""Every error has one form, names its field, and does not disturb other requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from quire.server.requests.errors import api_error
from quire.server.state.auth import Guard
from tests.server.checkpoint import SAYING
from tests.server.process import ServerProcess

USER = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Case = tuple[str, dict[str, Any], str]


def anything(*values: Any) -> tuple[Any, ...]:
    """Return values of several types as one tuple; the type checker cannot join the empty ones."""
    return values


INVALID: list[Case] = [
    (COMPLETIONS, {}, "prompt"),
    *((COMPLETIONS, {"prompt": bad}, "prompt") for bad in anything(None, 1, True, {}, [], [[]], [True], [1.0])),
    *((COMPLETIONS, {"prompt": bad}, "prompt[1]") for bad in anything([1, "a"], [1, True], ["a", [1]], [[1], []])),
    *((COMPLETIONS, {"prompt": bad}, "prompt") for bad in ([-1], [2**31], [1000], ["a"] * 257, [[[1]]])),
    (COMPLETIONS, {"prompt": ["a"] * 40, "n": 32}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "best_of": 33}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "beam_width": 33}, "beam_width"),
    (COMPLETIONS, {"prompt": "a", "beam_width": 1}, "beam_width"),
    (COMPLETIONS, {"prompt": ["a"] * 40, "beam_width": 32}, "beam_width"),
    (COMPLETIONS, {"prompt": "a", "beam_width": 4, "best_of": 4}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "beam_width": 4, "n": 5}, "n"),
    (COMPLETIONS, {"prompt": "a", "beam_width": 4, "temperature": 0.5}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "beam_width": 4, "top_p": 0.5}, "top_p"),
    (COMPLETIONS, {"prompt": "a", "beam_width": 4, "stream": True}, "stream"),
    (COMPLETIONS, {"prompt": "a", "beam_width": 4, "use_beam_search": False}, "use_beam_search"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, "n"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "best_of": 33}, "best_of"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": 1}, "use_beam_search"),
    (COMPLETIONS, {"prompt": ["a", "b", "c"], "priority": 1}, "priority"),
    (COMPLETIONS, {"prompt": ["a", "b", "c"], "priority": 1, "stream": True}, "priority"),
    (COMPLETIONS, {"prompt": "a", "length_penalty": 2.0}, "length_penalty"),
    (COMPLETIONS, {"prompt": "a", "early_stopping": True}, "early_stopping"),
    (COMPLETIONS, {"prompt": "a", "beam_width": 2, "early_stopping": "soon"}, "early_stopping"),
    (COMPLETIONS, {"prompt": "a", "beam_width": 2, "length_penalty": 11}, "length_penalty"),
    (COMPLETIONS, {"prompt": ["a"] * 40, "best_of": 32}, "best_of"),
    # More log probabilities than an answer may hold.
    (COMPLETIONS, {"prompt": "a", "n": 32, "max_tokens": 4000, "logprobs": 64}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "best_of": 32, "max_tokens": 4000, "logprobs": 64}, "logprobs"),
    (COMPLETIONS, {"prompt": [[5] * 4000] * 16, "max_tokens": 0, "echo": True, "logprobs": 64}, "logprobs"),
    (COMPLETIONS, {"prompt": [5] * 4000, "n": 16, "echo": True, "prompt_logprobs": 64}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": [5] * 4000, "n": 16, "stream": True, "echo": True, "logprobs": 64}, "logprobs"),
    (CHAT, {"messages": USER, "n": 32, "logprobs": True, "top_logprobs": 64}, "top_logprobs"),
    *(
        (COMPLETIONS, {"prompt": "a", field: bad}, field)
        for field, values in {
            "temperature": ("0", True, [], {}, -1, 1e999, 101),
            "top_p": (0, 1.1, "1", True),
            "top_k": (-2, 1.5, "5", True),
            "min_p": (-0.1, 2, "0"),
            "typical_p": (0, 1.1, "1"),
            "top_n_sigma": (-2, "1", True),
            "dry_multiplier": (-1, "1", 101),
            "dry_base": (0.5, "2"),
            "dry_allowed_length": (0, 1.5, "2"),
            "dry_penalty_last_n": (-2, 1.5, "2"),
            "dry_sequence_breakers": ([1], [""], {"a": 1}),
            "bad_words": (1, [1], [""], ["a"] * 1025),
            "repetition_penalty": (0, -1, "1"),
            "presence_penalty": (3, -3, "x", True),
            "frequency_penalty": (3, -3, "x"),
            "max_tokens": (-1, 1.5, "5", True, 0),
            "min_tokens": (-1, 17, "1", 1.5),
            "n": (0, -1, 129, 1.5, "1", True, 33),
            "best_of": (0, "1", True),
            "seed": (1.5, "1", True, 2**63),
            "stop": (1, [1], [""], "", ["a"] * 65, {"a": 1}, "a" * 1025),
            "stop_token_ids": ([-1], ["a"], 5, [1000], [1.5], [True]),
            "allowed_token_ids": ([], [-1], ["a"], [1000], "1"),
            "logit_bias": ([], "x", {"a": 1}, {"1": "x"}, {"1": 101}, {"1": None}, {"-1": 1}, {"1000": 1}, {"1": True}),
            "logprobs": (-1, 65, 1.5, "1", True),
            "prompt_logprobs": (-1, 65, "1", True),
            "ignore_eos": (1, "true"),
            "skip_special_tokens": (0, "no"),
            "include_stop_str_in_output": (1,),
            "add_special_tokens": (1,),
            "echo": (1, "yes"),
            "stream": (1, "true"),
            "stream_options": ([], "x", {"include_usage": True}),
            "user": (1,),
            "cache_salt": (1, "", "s" * 1025, "\u00e9" * 513),
            "priority": (1, -1, 2**31, "1", True),
            "return_token_ids": (1,),
            "model": (1, []),
        }.items()
        for bad in values
    ),
    *((CHAT, {"messages": bad}, "messages") for bad in anything(None, [], {}, "hi", 1)),
    (CHAT, {"messages": ["hi"]}, "messages[0]"),
    (CHAT, {"messages": [*USER, {"role": "king", "content": "hi"}]}, "messages[1].role"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (CHAT, {"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": USER, "max_tokens": "5"}, "max_tokens"),
    (CHAT, {"messages": USER, "logprobs": 2}, "logprobs"),
    (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 65}, "top_logprobs"),
    (CHAT, {"messages": USER, "chat_template_kwargs": []}, "chat_template_kwargs"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"raise_exception": 1}}, "chat_template_kwargs"),
    (CHAT, {"messages": USER, "tools": {}}, "tools"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
    ("/tokenize", {"prompt": 1}, "prompt"),
    *(("/detokenize", {"tokens": bad}, "tokens") for bad in (None, "a", [-1], [1000], ["a"], [True], [1.5])),
]
UNSUPPORTED: list[Case] = [
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
    (COMPLETIONS, {"prompt": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    (CHAT, {"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    (CHAT, {"messages": USER, "functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"messages": USER, "response_format": {"type": "structural_tag"}}, "response_format.type"),
    (CHAT, {"messages": USER, "modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"messages": USER, "audio": {"voice": "alloy"}}, "audio"),
    (CHAT, {"messages": USER, "chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, {"messages": USER, "echo": True}, "echo"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}]},
        "messages[0].content[0].type",
    ),
]


def check_form(raw: str, status: int) -> dict[str, Any]:
    """Check that an error has OpenAI's form and return it."""
    body = json.loads(raw)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert "Traceback" not in raw
    assert ".py" not in raw
    assert (body["error"]["type"] == "invalid_request_error") == (status not in (401, 403, 429, 500, 503))
    return dict(body["error"])


def ids_of(cases: list[Case]) -> list[str]:
    return [f"{path}:{field}-{idx}" for idx, (path, _, field) in enumerate(cases)]


@pytest.mark.parametrize(("path", "body", "field"), INVALID, ids=ids_of(INVALID))
def test_a_bad_value_is_a_400_that_names_it(server: ServerProcess, path: str, body: dict[str, Any], field: str) -> None:
    # The client's own encoder would not write infinity.
    raw = json.dumps(body).replace("Infinity", "1e999")
    response = server.http.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = check_form(response.text, 400)
    assert error["param"] == field
    assert error["code"] == "invalid_parameter"


@pytest.mark.parametrize(("path", "body", "field"), UNSUPPORTED, ids=ids_of(UNSUPPORTED))
@pytest.mark.parametrize("streamed", [False, True])
def test_an_unsupported_option_is_a_400_that_says_so(
    server: ServerProcess, path: str, body: dict[str, Any], field: str, streamed: bool
) -> None:
    response = server.post(path, {**body, "stream": streamed})
    assert response.status_code == 400, response.text
    error = check_form(response.text, 400)
    assert (error["param"], error["code"]) == (field, "unsupported_feature")


@pytest.mark.parametrize(
    ("method", "path", "headers", "content", "status", "code"),
    [
        ("GET", "/v1/nothing", {}, b"", 404, "not_found"),
        ("GET", "/v1/completions", {}, b"", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", {}, b"", 405, "method_not_allowed"),
        ("POST", "/v1/completions", {}, b'{"prompt": "a"}', 415, "unsupported_media_type"),
        ("POST", "/v1/completions", {"content-type": "text/plain"}, b'{"prompt": "a"}', 415, "unsupported_media_type"),
        ("POST", "/v1/completions", {"content-type": "application/json"}, b'{"prompt": ', 400, "invalid_json"),
        ("POST", "/v1/completions", {"content-type": "application/json"}, b"[" * 100_000, 400, "invalid_json"),
        ("POST", "/v1/completions", {"content-type": "application/json"}, b'{"prompt":"\\ud800"}', 400, "invalid_json"),
        ("POST", "/v1/completions", {"content-type": "application/json"}, b'{"n": NaN}', 400, "invalid_json"),
        ("POST", "/v1/completions", {"content-type": "application/json"}, b" " * (2 << 20), 413, "content_too_large"),
        ("GET", "/status", {"host": "evil.example"}, b"", 403, "host_not_allowed"),
        ("GET", "/status", {"host": "["}, b"", 403, "host_not_allowed"),
    ],
)
def test_every_error_status_has_the_same_form(
    server: ServerProcess, method: str, path: str, headers: dict[str, str], content: bytes, status: int, code: str
) -> None:
    response = server.http.request(method, path, headers=headers, content=content)
    assert response.status_code == status, response.text
    assert check_form(response.text, status)["code"] == code
    assert response.headers["content-type"] == "application/json"
    if status == 405:
        assert response.headers["allow"]


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/completions", "/v1/completions"),
        ("GET", "/models", "/v1/models"),
        ("GET", "/models/tiny", "/v1/models/tiny"),
        ("POST", "/embeddings", "/v1/embeddings"),
        ("POST", "/responses", "/v1/responses"),
        ("POST", "/messages", "/v1/messages"),
        ("POST", "/v1/v1/messages", "/v1/messages"),
        ("POST", "/v1/api/chat", "/api/chat"),
        ("POST", "/v1/chat/completions/", "/v1/chat/completions"),
        ("POST", "/chat", None),
        ("GET", "/v1", None),
        ("POST", "/v2/chat/completions", None),
        ("GET", "/models/" + "a" * 300, "/v1/models/" + "a" * 189),
    ],
)
def test_a_path_that_is_nearly_a_route_is_answered_with_a_question(
    server: ServerProcess, method: str, path: str, meant: str | None
) -> None:
    error = check_form(server.http.request(method, path).text, 404)
    hint = "" if meant is None else f"; did you mean {meant}?"
    assert error["message"] == f"there is no such route: {method} {path[:200]}{hint}"


def test_a_body_without_content_length_is_bounded_too(server: ServerProcess) -> None:
    parts = iter([b'{"prompt": "'] + [b"a" * 65536] * 32)
    response = server.http.post(COMPLETIONS, content=parts, headers={"content-type": "application/json"})
    assert response.status_code == 413
    check_form(response.text, 413)


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-4", prompt="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_an_internal_failure_shows_no_internals() -> None:
    error = api_error(KeyError("/secret/path.py"), "the-id")
    assert error.status == 500
    assert "secret" not in json.dumps(error.body())
    assert "the-id" in str(error)


@pytest.mark.parametrize("has_begun", [False, True])
def test_base_exceptions_become_an_answer_too(has_begun: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Panic(BaseException):
        """As a library in Rust raises it."""

    sent: list[Any] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        if has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise Panic("of its own")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/health", "headers": []}
    asyncio.run(Guard(app, api_key=None)(scope, None, send))  # type: ignore[arg-type]
    if has_begun:
        assert [message["status"] for message in sent] == [200]
    else:
        start, body = sent
        assert (start["status"], check_form(body["body"].decode(), 500)["code"]) == (500, "internal_error")
        assert b"of its own" not in body["body"]
    assert "of its own" in caplog.text


def test_a_bad_request_costs_nobody_else_anything(server: ServerProcess) -> None:
    body = {"prompt": "Z", "max_tokens": 28, "temperature": 0, "stream": True}
    with server.http.stream("POST", COMPLETIONS, json=body) as response:
        for path, bad, _ in INVALID[::10]:
            assert server.http.post(path, content=json.dumps(bad)).status_code == 415
            assert server.http.post(
                path, content=json.dumps(bad), headers={"content-type": "application/json"}
            ).is_error
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == SAYING + "abcdef"
    assert server.wait_until_idle()["memory"]["num_sequences"] == 0
