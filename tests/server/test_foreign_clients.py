"""What clients of OpenAI, vLLM, llama.cpp, SGLang and Ollama send: honoured, taken as a label, or warned of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.process import ServerProcess, running
from tests.server.tool_answers import CALLS, HAS_GRAMMARS, Serve, ask, names_and_arguments

USER: list[Any] = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ORIGIN = "https://example.org"
KEY = "a secret"
# The headers of OpenAI's JavaScript client, which a browser asks for before it sends them.
BROWSER_HEADERS = (
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
    "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version"
)
OPEN_SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["fox", "owl"]}}, "required": ["kind"]}
needs_grammars = pytest.mark.skipif(not HAS_GRAMMARS, reason="llguidance is not installed")


@pytest.fixture(scope="module")
def web_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("logs") / "web.log"
    flags = ("--num-kv-blocks", "256", "--allow-origin", ORIGIN, "--disable-log-requests", "--enforce-eager")
    with running(folder, log, *flags, key=KEY) as process:
        yield process


def test_a_page_may_send_the_headers_of_the_javascript_client(web_server: ServerProcess) -> None:
    asked = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": BROWSER_HEADERS,
    }
    answer = httpx.options(web_server.url + CHAT, headers=asked)
    assert answer.status_code == 200
    allowed = {name.strip().lower() for name in answer.headers["access-control-allow-headers"].split(",")}
    assert allowed >= set(BROWSER_HEADERS.split(","))
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert httpx.options(web_server.url + CHAT, headers={**asked, "origin": "https://evil.org"}).status_code == 400


def test_without_an_allowed_origin_a_preflight_is_refused_with_a_hint(server: ServerProcess) -> None:
    answer = httpx.options(server.url + CHAT, headers={"origin": ORIGIN, "access-control-request-method": "POST"})
    assert answer.status_code == 405
    assert "--allow-origin" in answer.json()["error"]["message"]


def test_a_key_may_come_in_the_header_of_anthropic(web_server: ServerProcess) -> None:
    def status(**headers: str) -> int:
        return httpx.get(f"{web_server.url}/v1/models", headers=headers).status_code

    assert status(**{"x-api-key": KEY}) == status(authorization=f"Bearer {KEY}") == 200
    assert status(**{"x-api-key": "wrong"}) == status() == 401
    assert status(**{"x-api-key": KEY, "authorization": "Bearer wrong"}) == 200


def test_neutral_flags_are_named_in_the_log(web_server: ServerProcess) -> None:
    lines = [line for line in web_server.log.read_text().splitlines() if "ignored options" in line]
    assert len(lines) == 1
    assert lines[0].endswith("disable_log_requests")


def test_the_request_id_of_a_client_comes_back(server: ServerProcess) -> None:
    def answer(given: str) -> httpx.Response:
        body = {"prompt": "a", "max_tokens": 1}
        return httpx.post(server.url + COMPLETIONS, json=body, headers={"x-request-id": given}, timeout=60)

    twice = [answer("mine-1"), answer("mine-1")]
    assert [each.headers["x-request-id"] for each in twice] == ["mine-1", "mine-1"]
    assert twice[0].json()["id"] != twice[1].json()["id"]
    for bad in ("", "a b", "x" * 129):
        own = answer(bad).headers["x-request-id"]
        assert len(own) == 32
        assert own != bad


def test_small_routes(server: ServerProcess) -> None:
    assert httpx.get(f"{server.url}/ping").json()["status"] == "ok"
    assert httpx.post(f"{server.url}/ping").status_code == 200
    assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}
    info = httpx.get(f"{server.url}/tokenizer_info").json()
    assert info["eos_token"] == "<|eos|>"
    assert "<|assistant|>" in info["chat_template"]
    assert info["pad_token"] is None


def test_labels_and_hints_change_nothing(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 8, "temperature": 0}
    plain = client.chat.completions.create(**asked)
    labelled = client.chat.completions.create(
        **asked,
        metadata={"run": "1"},
        store=True,
        verbosity="low",
        service_tier="flex",
        prompt_cache_retention="24h",
        prediction={"type": "content", "content": "x"},
    )
    assert labelled.choices[0].message.content == plain.choices[0].message.content
    for bad in ({"metadata": "x"}, {"store": "yes"}, {"verbosity": 1}):
        with pytest.raises(openai.BadRequestError, match=next(iter(bad))):
            client.chat.completions.create(**asked, extra_body=bad)


def test_an_unknown_field_is_warned_of_once(server: ServerProcess) -> None:
    for _ in range(3):
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "temprature": 0}).status_code == 200
    lines = [line for line in server.log.read_text().splitlines() if "temprature" in line]
    assert len(lines) == 1
    assert lines[0].endswith("WARNING ignored the unknown field 'temprature'; did you mean temperature?")


def test_the_final_message_is_continued(server: ServerProcess) -> None:
    messages = [*USER, {"role": "assistant", "content": "ab"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    continued = server.post("/tokenize", body).json()["tokens"]
    begun = server.post("/tokenize", {"messages": USER}).json()["tokens"]
    text = server.post("/tokenize", {"prompt": "ab", "add_special_tokens": False}).json()["tokens"]
    assert continued == begun + text
    asked = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    whole = server.post(COMPLETIONS, {"prompt": continued, **asked}).json()["choices"][0]["text"]
    answer = server.post(CHAT, {"messages": messages, "continue_final_message": True, **asked}).json()
    assert answer["choices"][0]["message"]["content"] == whole
    refused = server.post(CHAT, {"messages": messages, "continue_final_message": True, "add_generation_prompt": True})
    assert refused.json()["error"]["param"] == "continue_final_message"


CONSTRAINTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "json_object with a schema": (
        {"response_format": {"type": "json_object", "schema": {**OPEN_SCHEMA, "additionalProperties": False}}},
        ("fox", "owl"),
    ),
    "json_schema without additionalProperties": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": OPEN_SCHEMA}}},
        ("fox", "owl"),
    ),
    "format": ({"format": OPEN_SCHEMA}, ("fox", "owl")),
    "json_schema": ({"json_schema": OPEN_SCHEMA}, ("fox", "owl")),
    "disable_additional_properties": (
        {"structured_outputs": {"json": OPEN_SCHEMA, "disable_additional_properties": True}},
        ("fox", "owl"),
    ),
    "json_schema as text": ({"json_schema": json.dumps(OPEN_SCHEMA)}, ("fox", "owl")),
    "disable_additional_properties of a schema as text": (
        {"structured_outputs": {"json": json.dumps(OPEN_SCHEMA), "disable_additional_properties": True}},
        ("fox", "owl"),
    ),
    "grammar": ({"grammar": 'root ::= "SELECT " column\ncolumn ::= "a" | "b"\n'}, ("SELECT a", "SELECT b")),
    "ebnf": ({"ebnf": 'root ::= ("x" | "y") [0-1]'}, ("x0", "x1", "y0", "y1")),
    "regex": ({"regex": "(red|blue) fox"}, ("red fox", "blue fox")),
}


@needs_grammars
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_of_other_engines_are_honoured(server: ServerProcess, name: str) -> None:
    constraint, allowed = CONSTRAINTS[name]
    for seed in range(3):
        body = {"messages": USER, "max_tokens": 60, "temperature": 2.0, "seed": seed, **constraint}
        answer = server.post(CHAT, body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        text = choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
        if allowed[0] == "fox":
            assert set(json.loads(text)) == {"kind"}
            text = json.loads(text)["kind"]
        assert text in allowed


@needs_grammars
def test_constraints_that_cannot_be_read_are_refused_by_name(server: ServerProcess) -> None:
    for field, value in (("format", "xml"), ("ebnf", "root ::= ("), ("grammar", "root ::= x"), ("json_schema", 1)):
        answer = server.post(CHAT, {"messages": USER, field: value})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
    both = server.post(CHAT, {"messages": USER, "format": "json", "regex": "a"})
    assert both.json()["error"]["param"] == "regex"


@needs_grammars
@pytest.mark.parametrize(
    "form", ["hermes", *(pytest.param(form, marks=pytest.mark.slow) for form in ("llama3", "mistral"))]
)
def test_an_output_with_tools_and_a_format_is_a_call_or_follows_the_format(serve: Serve, form: str) -> None:
    server = serve(form)
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": OPEN_SCHEMA}}
    seen = set()
    # Llama's calls begin as answers do: this model would write nothing else.
    begins = ("n", '{"name": "get_weather", "parameters": ') if form == "llama3" else ()
    bodies = [{"prompt": text, "add_special_tokens": False} for text in begins]
    bias = {str(server.post("/tokenize", body).json()["tokens"][0]): -100 for body in bodies}
    for seed in range(8):
        choice = ask(server, response_format=wanted, temperature=100, seed=seed, max_tokens=60, logit_bias=bias)
        calls = choice["message"].get("tool_calls")
        if calls:
            assert {name for name, _ in names_and_arguments(calls)} <= {"get_weather", "now"}
        elif choice["finish_reason"] == "stop":
            answer = json.loads(choice["message"]["content"])
            assert set(answer) == {"kind"}
            assert answer["kind"] in ("fox", "owl")
            seen.add(answer["kind"])
    assert seen
    required = ask(server, response_format=wanted, tool_choice="required")
    assert names_and_arguments(required["message"]["tool_calls"])[0] in CALLS
    refused = server.post(CHAT, {"messages": USER, "grammar": 'root ::= "a"', "tools": _tools()})
    assert refused.status_code == 400


def _tools() -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "now"}}]
