"""A panic of the tokenizer's library fails only the requests that cause it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server import checkpoint
from tests.server.process import ServerProcess, running

# Behind letters of one kind the search for a "b" goes through all ways to divide them.
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+b$"}, "behavior": "Isolated", "invert": False}
BOMB = "a" * 40
USER = [{"role": "user", "content": BOMB}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = checkpoint.save(tmp_path_factory.mktemp("panics") / "tiny")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [SPLIT, tokenizer["pre_tokenizer"]]}
    path.write_text(json.dumps(tokenizer))
    flags = ("--num-kv-blocks", "300", "--pin-limit", "0.1")
    with running(folder, tmp_path_factory.mktemp("logs") / "panics.log", *flags) as process:
        yield process


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/v1/completions", {"prompt": BOMB}, "prompt"),
        ("/v1/completions", {"prompt": ["Z", BOMB]}, "prompt[1]"),
        ("/v1/completions", {"prompt": "Z", "bad_words": [BOMB]}, "bad_words"),
        ("/v1/chat/completions", {"messages": USER}, "messages"),
        ("/tokenize", {"prompt": BOMB}, "prompt"),
        ("/tokenize", {"messages": USER}, "messages"),
        ("/pin_prefix", {"name": "a", "prompt": BOMB}, "prompt"),
    ],
)
def test_it_is_a_400_in_the_usual_form(server: ServerProcess, route: str, body: dict[str, Any], param: str) -> None:
    answer = server.post(route, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_parameter")
    assert "the tokenizer library gave up" in error["message"]
    assert server.post("/v1/completions", {"prompt": "Z", "max_tokens": 3}).json()["choices"][0]["text"] == "abc"
    assert server.status()["engine"]["is_alive"]
