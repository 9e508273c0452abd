"""Embeddings, scores and reranking over HTTP, with the real client of OpenAI and without it."""

from __future__ import annotations

import base64
import math
import struct
from operator import mul
from pathlib import Path
from typing import Any

import openai
import pytest

from quire import LLM
from tests.server.process import ServerProcess

TEXTS = ["ab", "QZ", "abcdefg"]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[float]]:
    """The embeddings of the texts by the Python interface."""
    with LLM(str(folder), num_kv_blocks=300, num_threads=1) as llm:
        return [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]


def embed(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    response = server.post("/v1/embeddings", fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def test_openais_client_reads_embeddings_in_both_encodings(client: openai.OpenAI, expected: list[list[float]]) -> None:
    # The client asks for base64 by itself.
    for answer in (
        client.embeddings.create(model="tiny", input=TEXTS),
        client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float"),
    ):
        assert answer.object == "list"
        assert [each.index for each in answer.data] == [0, 1, 2]
        for each, wanted in zip(answer.data, expected, strict=True):
            assert list(each.embedding) == pytest.approx(wanted, abs=1e-2)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 3
    short = client.embeddings.create(model="tiny", input="ab", dimensions=5).data[0].embedding
    assert len(short) == 5
    assert math.hypot(*short) == pytest.approx(1.0, abs=1e-5)


def test_every_form_of_input_gives_the_same(server: ServerProcess) -> None:
    ids = server.post("/tokenize", {"prompt": "abcdefg"}).json()["tokens"]
    forms = ["abcdefg", ["abcdefg"], ids, [ids], [ids, ids]]
    first, *others = [embed(server, input=form)["data"] for form in forms]
    for other in others:
        assert all(each["embedding"] == pytest.approx(first[0]["embedding"], abs=1e-2) for each in other)
    packed = embed(server, input=ids, encoding_format="base64")["data"][0]["embedding"]
    values = struct.unpack(f"<{len(first[0]['embedding'])}f", base64.b64decode(packed))
    assert values == pytest.approx(first[0]["embedding"], abs=1e-2)
    cut = embed(server, input=ids, truncate_prompt_tokens=3)
    assert cut["usage"]["prompt_tokens"] == 3
    assert cut["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/embeddings", {}, "input", "a string, a list of strings"),
        ("/v1/embeddings", {"input": []}, "input", "a string, a list of strings"),
        ("/v1/embeddings", {"input": ["a", 5]}, "input[1]", "must be a string, as input[0] is, got 5"),
        ("/v1/embeddings", {"input": [10**6]}, "input", "token ids from 0"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "float, base64"),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions", "at most the width of the model (64)"),
        ("/v1/embeddings", {"input": "a", "dimensions": "5"}, "dimensions", "an integer from 1"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 10**5}, "truncate_prompt_tokens", "at most 4095"),
        ("/v1/embeddings", {"input": "a", "stream": True}, "stream", "false"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, "model", "does not exist"),
        ("/v1/score", {"text_1": "a"}, "text_2", "a string or a list of strings"),
        ("/v1/score", {"queries": ["a", "b"], "documents": ["a"] * 3}, "queries", "as many as documents has"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "instruction": "c"}, "instruction", "embedding model has none"),
        ("/v1/rerank", {"documents": ["a"]}, "query", "a string"),
        ("/v1/rerank", {"query": "a", "documents": [5]}, "documents[0]", "documents[0] must be a string, got 5"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n", "an integer from 0"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 9999}, "documents", "at most"),
    ],
)
def test_bad_bodies_are_refused(
    server: ServerProcess, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    response = server.post(path, body)
    assert response.status_code in (400, 404), response.text
    error = response.json()["error"]
    assert words in error["message"]
    if param is not None:
        assert error["param"] == param


def test_scores_and_ranks_are_those_of_the_embeddings(server: ServerProcess, expected: list[list[float]]) -> None:
    query, *documents = expected
    wanted = [sum(map(mul, query, document)) for document in documents]
    for body in ({"text_1": "ab", "text_2": TEXTS[1:]}, {"queries": ["ab"], "documents": TEXTS[1:]}):
        data = server.post("/v1/score", body).json()["data"]
        assert [each["index"] for each in data] == [0, 1]
        assert [each["score"] for each in data] == pytest.approx(wanted, abs=1e-2)
    order = sorted((0, 1), key=lambda idx: -wanted[idx])
    for path in ("/v1/rerank", "/rerank"):
        results = server.post(path, {"query": "ab", "documents": TEXTS[1:]}).json()["results"]
        assert [each["index"] for each in results] == order
        assert [each["document"]["text"] for each in results] == [TEXTS[1:][idx] for idx in order]
        assert results[0]["relevance_score"] == pytest.approx(max(wanted), abs=1e-2)
    ask: dict[str, Any] = {
        "query": "ab",
        "documents": [{"text": each} for each in TEXTS],
        "top_n": 1,
        "return_documents": False,
    }
    (best,) = server.post("/rerank", ask).json()["results"]
    assert best == {"index": 0, "relevance_score": pytest.approx(1.0, abs=1e-2)}
