"""Structured outputs over HTTP: OpenAI's fields, vLLM's old and new ones, and errors that name the client's field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

from tests.server.checkpoint import SAYING
from tests.server.process import ServerProcess, running
from tests.server.test_errors import check_form

USER: list[Any] = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "is_big": {"type": "boolean"}},
    "required": ["city", "is_big"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": SCHEMA}}
TIME_BOMB = {"type": "integer", "multipleOf": 999_983}


@pytest.fixture(scope="module")
def strict_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that gives grammars little time."""
    flags = ("--num-kv-blocks", "300", "--grammar-timeout-s", "1.5", "--grammar-memory-bytes", "4GiB")
    with running(folder, tmp_path_factory.mktemp("logs") / "strict.log", *flags) as process:
        yield process


def is_place(text: str) -> bool:
    place = json.loads(text)
    return set(place) == {"city", "is_big"} and place["city"] in ("Oslo", "Rome") and type(place["is_big"]) is bool


@pytest.mark.parametrize("n", [1, 3])
def test_a_json_schema_through_the_client(client: openai.OpenAI, n: int) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=USER, response_format=FORMAT, max_tokens=200, temperature=1.0, n=n, seed=1
    )
    assert all(is_place(choice.message.content or "") for choice in answer.choices)
    assert all(choice.finish_reason == "stop" for choice in answer.choices)


def test_a_stream_gives_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "response_format": FORMAT, "max_tokens": 200, "seed": 2}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert is_place(whole or "")


def test_the_clients_own_parser_reads_it(client: openai.OpenAI) -> None:
    pydantic = pytest.importorskip("pydantic", reason="the client brings it")
    place = pydantic.create_model("Place", name=(bool, ...), size=(bool, ...))
    parsed = client.chat.completions.parse(model="tiny", messages=USER, response_format=place, max_tokens=200, seed=3)
    assert type(parsed.choices[0].message.parsed.name) is bool


def test_any_object_and_any_text(client: openai.OpenAI) -> None:
    for kind in ("json_object", "text"):
        form: Any = {"type": kind}
        answer = client.chat.completions.create(
            model="tiny",
            messages=USER,
            response_format=form,
            max_tokens=40,
            temperature=0,
        )
        text = answer.choices[0].message.content or ""
        assert text.startswith("{") if kind == "json_object" else text.startswith(SAYING)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/ "y"'}}, "x[0-9]y"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"structured_outputs": {"json": '{"type": "boolean"}', "disable_any_whitespace": True}}, "true|false"),
        ({"guided_json": {"type": "boolean"}}, "true|false"),
        ({"guided_regex": "[ab]{3}", "guided_decoding_backend": "guidance"}, "[ab]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "x" /[0-9]/ "y"'}, "x[0-9]y"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "b", "schema": {"enum": [17]}}}}, "17"),
        ({"response_format": {"type": "text"}, "guided_choice": ["yes", "no"]}, "yes|no"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_spelling_is_honoured_on_both_routes(
    server: ServerProcess, path: str, asked: dict[str, Any], pattern: str
) -> None:
    start = {"prompt": ["a", "b"]} if path == COMPLETIONS else {"messages": USER, "n": 2}
    answer = server.post(path, {**start, **asked, "max_tokens": 30})
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    texts = [choice["text"] if path == COMPLETIONS else choice["message"]["content"] for choice in choices]
    assert len(texts) == 2
    assert all(re.fullmatch(pattern, text) for text in texts)


def json_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"strict": 1}}}, "response_format.json_schema.strict"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": 1}}}, "response_format.json_schema.name"),
    (json_schema("{}"), "response_format.json_schema.schema"),
    (json_schema({"type": "strin"}), "response_format.json_schema.schema"),
    (json_schema({"not": {}}), "response_format.json_schema.schema"),
    (json_schema({"$ref": "#/nowhere"}), "response_format.json_schema.schema"),
    (json_schema({"const": "x" * 200_000}), "response_format.json_schema.schema"),
    ({"structured_outputs": []}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "(?<=a)b"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
    ({"guided_json": {"type": "strin"}}, "guided_json"),
    ({"guided_json": 1}, "guided_json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": ["a", 1]}, "guided_choice"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_grammar": "start x"}, "guided_grammar"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize(("asked", "field"), BAD, ids=[f"{field}-{idx}" for idx, (_, field) in enumerate(BAD)])
@pytest.mark.parametrize("streamed", [False, True])
def test_what_is_wrong_is_a_400_that_names_the_clients_own_field(
    server: ServerProcess, asked: dict[str, Any], field: str, streamed: bool
) -> None:
    for path, start in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
        answer = server.post(path, {**start, **asked, "stream": streamed})
        assert answer.status_code == 400, answer.text
        error = check_form(answer.text, 400)
        assert (error["param"], error["code"]) == (field, "invalid_parameter")
        assert error["message"].startswith(field), "it is called what the client called it"


@pytest.mark.parametrize("field", ["structural_tag", "whitespace_pattern"])
def test_what_is_known_but_not_supported_says_so(server: ServerProcess, field: str) -> None:
    answer = server.post(COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": {}, field: True}})
    assert answer.status_code == 400
    assert check_form(answer.text, 400)["param"] == f"structured_outputs.{field}"
    assert check_form(answer.text, 400)["code"] == "unsupported_feature"


@pytest.mark.slow
def test_bombs_are_refused_and_the_server_goes_on(strict_server: ServerProcess) -> None:
    with ThreadPoolExecutor(4) as pool:
        bomb = {"prompt": "a", "guided_json": TIME_BOMB}
        bombs = [pool.submit(strict_server.post, COMPLETIONS, bomb) for _ in range(2)]
        free = strict_server.post(COMPLETIONS, {"prompt": "Z", "max_tokens": 18, "temperature": 0})
        assert free.json()["choices"][0]["text"] == SAYING[: len(free.json()["choices"][0]["text"])]
        assert not any(bomb.done() for bomb in bombs), "nobody waited for them"
        for answer in (bomb.result() for bomb in bombs):
            assert answer.status_code == 400
            error = check_form(answer.text, 400)
            assert error["param"] == "guided_json"
            assert "1.5 s (grammar_timeout_s)" in error["message"]
    after = strict_server.post(COMPLETIONS, {"prompt": "a", "guided_choice": ["yes"]})
    assert after.json()["choices"][0]["text"] == "yes"
    strict_server.wait_until_idle()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_that_leaves_itself_no_token_is_told_why(server: ServerProcess, streamed: bool) -> None:
    body = {"prompt": "a", "guided_choice": ["yes"], "min_tokens": 10, "stream": streamed}
    answer = server.post(COMPLETIONS, body)
    text = answer.text
    if streamed and answer.status_code == 200:
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        text = lines[-1]
    else:
        assert answer.status_code == 400, text
    error = check_form(text, 400)
    assert error["code"] == "request_failed"
    assert "structured_outputs" in error["message"]
    server.wait_until_idle()
