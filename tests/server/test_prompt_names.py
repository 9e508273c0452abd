"""Errors about one prompt of several say which, by the client's name of the list."""

from __future__ import annotations

import json
import math
from typing import Any

import openai
import pytest

from quire.engine.inputs.prompts import TextPair
from quire.engine.scoring import CLASSES, ScoreJob
from quire.sequences.pooling import Pooling
from tests.server.process import ServerProcess

COMPLETIONS, EMBEDDINGS, RERANK, SCORE = "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score"
# More tokens than the context has.
LONG = "fox " * 5000
TOO_LONG = "the prompt has "
BARE = {"add_special_tokens": False}

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {"prompt": ["a", LONG]}, "prompt[1]", f"prompt[1]: {TOO_LONG}"),
    (COMPLETIONS, {"prompt": ["a", ""], **BARE}, "prompt[1]", "prompt[1] must be at least one token long, got ''"),
    (COMPLETIONS, {"prompt": [[1], [2], [3, 1000]]}, "prompt[2]", "prompt[2] must be token ids from 0 to "),
    (COMPLETIONS, {"prompt": ["a", "b", 5]}, "prompt[2]", "prompt[2] must be a string, as prompt[0] is, got 5"),
    (COMPLETIONS, {"prompt": [[1], []]}, "prompt[1]", "prompt[1] must be a list of token ids that is not empty, as "),
    (COMPLETIONS, {"prompt": [5, "a"]}, "prompt[1]", "prompt[1] must be a token id, as prompt[0] is, got 'a'"),
    # One prompt needs no index.
    (COMPLETIONS, {"prompt": [LONG]}, "prompt", TOO_LONG),
    (COMPLETIONS, {"prompt": [""], **BARE}, "prompt", "prompt must be at least one token long"),
    # What is wrong with all of them is not one prompt's.
    (COMPLETIONS, {"prompt": ["a", "b"], "stop": [""]}, "stop", "stop must be "),
    (COMPLETIONS, {"prompt": ["a", "b"], "priority": 1}, "priority", "priority must be 0 "),
    (COMPLETIONS, {"prompt": ["a", LONG], "priority": 1}, "priority", "priority must be 0 "),  # before a text is read
    # The engine's own limits, which it checks last.
    (
        COMPLETIONS,
        {"prompt": [[5], [5] * 3000], "beam_width": 16, "temperature": 0, "max_tokens": 500},
        "prompt[1]",
        f"prompt[1]: {TOO_LONG}3000 tokens but the KV cache ",
    ),
    (EMBEDDINGS, {"input": ["a", LONG, "b"]}, "input[1]", f"input[1]: {TOO_LONG}"),
    (EMBEDDINGS, {"input": [[1], [1000]]}, "input[1]", "input[1] must be token ids from 0 to "),
    (EMBEDDINGS, {"input": ["a", "b"], "truncate_prompt_tokens": 10**5}, "truncate_prompt_tokens", "truncate_prompt_"),
    (RERANK, {"query": "a", "documents": ["b", LONG]}, "documents[1]", f"documents[1]: {TOO_LONG}"),
    (RERANK, {"query": LONG, "documents": ["b", "c"]}, "query", f"query: {TOO_LONG}"),
    (RERANK, {"query": "a", "documents": [LONG]}, "documents", TOO_LONG),
    (
        RERANK,
        {"query": "a", "documents": ["b", {"txt": "c"}]},
        "documents[1]",
        "documents[1] must be a string, got {'t",
    ),
    (SCORE, {"queries": ["a", LONG], "documents": ["b", "c"]}, "queries[1]", f"queries[1]: {TOO_LONG}"),
    (SCORE, {"text_1": "a", "text_2": ["b", 5]}, "text_2[1]", "text_2[1] must be a string, got 5"),
]


@pytest.mark.parametrize(("path", "body", "param", "words"), CASES)
def test_an_error_names_the_prompt(
    server: ServerProcess, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    for more in ({}, {"stream": True} if path == COMPLETIONS and "beam_width" not in body else {}):
        response = server.post(path, {**body, **more})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], error["message"][: len(words)]) == (param, words)
    server.wait_until_idle()


def test_a_prompt_of_a_query_and_a_document_is_the_documents() -> None:
    pair, query, scores = TextPair("a", "b"), "a", [(0, 0), (1, 1)]
    pairs = ScoreJob([pair, pair], CLASSES, scores, math.dist)
    assert [pairs.text_name(idx, ("query", "documents")) for idx in (0, 1)] == ["documents[0]", "documents[1]"]
    assert ScoreJob([pair], CLASSES, scores[:1], math.dist).text_name(0, ("query", "documents")) == "documents"
    embedded = ScoreJob([query] * 3, Pooling(), [(0, 1), (0, 2)], math.dist)
    names = [embedded.text_name(idx, ("query", "documents")) for idx in range(3)]
    assert names == ["query", "documents[0]", "documents[1]"]


def test_ollamas_embeddings_name_the_input(server: ServerProcess) -> None:
    response = server.post("/api/embed", {"input": ["a", LONG], "truncate": False})
    assert response.status_code == 400
    assert response.json()["error"].startswith(f"input[1]: {TOO_LONG}")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_that_fails_later_names_the_prompt(server: ServerProcess, streamed: bool) -> None:
    body = {"prompt": ["a", "b"], "guided_choice": ["yes"], "min_tokens": 10, "stream": streamed}
    text = server.post(COMPLETIONS, body).text
    if text.startswith("data: "):
        text = [line[6:] for line in text.splitlines() if line.startswith("data: {")][-1]
    error = json.loads(text)["error"]
    assert error["code"] == "request_failed"
    assert error["message"].startswith(("prompt[0]: ", "prompt[1]: "))
    server.wait_until_idle()


def test_openais_client_shows_the_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]: the prompt has") as caught:
        client.embeddings.create(model="tiny", input=["a", LONG])
    assert (caught.value.param, caught.value.code) == ("input[1]", "context_length_exceeded")
