"""Embeddings, scores and classes of encoders over HTTP, with the real clients of OpenAI and Ollama."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest
from starlette.testclient import TestClient

from quire import LLM
from quire.config import EngineConfig
from quire.engine.async_llm import AsyncLLM
from quire.server.app import build_app
from quire.server.requests.body import BodyReader
from quire.server.settings import ServerConfig
from quire.server.state.state import ServerState
from tests.models import encoders

URL = "http://127.0.0.1"
TEXTS = ["a red kite", "the small fox slept", "kites ."]
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "served_model_name": "tiny"}
# Heads of the checkpoints, and numbers of classes; the first has embeddings.
CHECKPOINTS = {"embeds": ("Model", None), "scores": ("ForSequenceClassification", 1)}
CHECKPOINTS |= {"classifies": ("ForSequenceClassification", 3), "names": ("ForTokenClassification", 4)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, (head, num_labels) in CHECKPOINTS.items():
        made[name] = tmp_path_factory.mktemp(name)
        encoders.save(made[name], "bert", head, **({} if num_labels is None else {"num_labels": num_labels}))
    encoders.state_pooling(made["embeds"], "pooling_mode_mean_tokens", prompts={"query": "the ", "plain": ""})
    return made


@pytest.fixture(scope="module")
def http(folders: dict[str, Path]) -> Iterator[Callable[[str], TestClient]]:
    """Gives a client of the server of a checkpoint, both in this process."""
    clients: dict[str, TestClient] = {}
    with ExitStack() as stack:

        def client_of(name: str) -> TestClient:
            if name not in clients:
                llm = AsyncLLM.from_config(EngineConfig.from_options(model=str(folders[name]), **OPTIONS))
                stack.callback(llm.shutdown)
                bodies = BodyReader(1 << 20, 1 << 10)
                stack.callback(bodies.close)
                app = build_app(ServerState(llm, ServerConfig(), bodies, "0", created=1))
                clients[name] = TestClient(app, base_url=URL)
            return clients[name]

        yield client_of


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> list[list[float]]:
    with LLM(str(folders["embeds"]), **OPTIONS) as llm:
        return [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]


class InProcess(httpx.BaseTransport):
    """Sends the requests of a client of httpx to a server in this process."""

    def __init__(self, client: TestClient) -> None:
        self._client = client

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path, headers = request.url.raw_path.decode(), dict(request.headers)
        found = self._client.request(request.method, path, content=request.read(), headers=headers)
        return httpx.Response(found.status_code, headers=dict(found.headers), content=found.content)


def near(values: Any) -> Any:
    return pytest.approx(values, abs=1e-5)


def test_openais_client(http: Callable[[str], TestClient], expected: list[list[float]]) -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", http_client=http("embeds"), max_retries=0)
    # The client asks for base64 by itself.
    for answer in (
        client.embeddings.create(model="tiny", input=TEXTS),
        client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float"),
    ):
        assert [list(each.embedding) for each in answer.data] == [near(each) for each in expected]
    (short,) = client.embeddings.create(model="tiny", input="a red kite", dimensions=3).data
    assert len(short.embedding) == 3
    assert answer.usage.prompt_tokens == 5 + 6 + 5
    with pytest.raises(openai.BadRequestError, match="makes embeddings only") as caught:
        client.completions.create(model="tiny", prompt="a")
    assert caught.value.param == "prompt"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
    assert client.models.retrieve("tiny").model_dump()["max_model_len"] == 64


def test_ollamas_client(http: Callable[[str], TestClient], expected: list[list[float]]) -> None:
    client = ollama.Client(host=URL, transport=InProcess(http("embeds")))
    answer = client.embed(model="tiny", input=TEXTS, keep_alive="5m", options={"num_ctx": 64})
    assert [list(each) for each in answer.embeddings] == [near(each) for each in expected]
    assert (answer.model, answer.prompt_eval_count) == ("tiny", 16)
    assert len(client.embed(model="tiny:latest", input=TEXTS[0], dimensions=4).embeddings[0]) == 4
    old = client.embeddings(model="tiny", prompt=TEXTS[0]).embedding
    assert [value / sum(each * each for each in old) ** 0.5 for value in old] == near(expected[0])
    cut = client.embed(model="tiny", input="kite " * 100)
    assert cut.prompt_eval_count == 64
    with pytest.raises(ollama.ResponseError, match="the prompt has 102 tokens"):
        client.embed(model="tiny", input="kite " * 100, truncate=False)
    assert client.embed(model="tiny", input=[]).embeddings == []
    assert client.show("tiny").capabilities == ["embedding"]
    with pytest.raises(ollama.ResponseError, match="makes embeddings only"):
        client.generate(model="tiny", prompt="a", raw=True)


def test_prompts_and_packed_embeddings(http: Callable[[str], TestClient], expected: list[list[float]]) -> None:
    client = http("embeds")
    body = {"input": "small fox slept", "prompt_name": "query", "encoding_format": "base64"}
    (data,) = client.post("/v1/embeddings", json=body).json()["data"]
    assert struct.unpack("<32f", base64.b64decode(data["embedding"])) == near(expected[1])
    for kind, text in (("query", "small fox slept"), ("search_query", "small fox slept"), ("passage", TEXTS[1])):
        (data,) = client.post("/v1/embeddings", json={"input": text, "input_type": kind}).json()["data"]
        assert data["embedding"] == near(expected[1])


def test_prompts_of_queries_and_documents(http: Callable[[str], TestClient]) -> None:
    """A query has the prompt "query" by default; documents have none, since the checkpoint names none for them."""
    client = http("embeds")
    first = {"index": 1, "document": {"text": TEXTS[1]}, "relevance_score": near(1.0)}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        for body in ({"query": "small fox slept"}, {"query": TEXTS[1], "query_prompt_name": "plain"}):
            answer = client.post(path, json={**body, "documents": TEXTS}).json()["results"]
            assert answer[0] == first
    body = {"text_1": "small fox slept", "text_2": "small fox slept", "document_prompt_name": "query"}
    (data,) = client.post("/score", json=body).json()["data"]
    assert data["score"] == near(1.0)
    del body["document_prompt_name"]
    (data,) = client.post("/score", json=body).json()["data"]
    assert data["score"] < 1 - 2e-5


def test_a_cross_encoder_ranks(http: Callable[[str], TestClient], folders: dict[str, Path]) -> None:
    client = http("scores")
    with LLM(str(folders["scores"]), **OPTIONS) as llm:
        wanted = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    for path in ("/score", "/v1/score"):
        data = client.post(path, json={"text_1": TEXTS[0], "text_2": TEXTS}).json()["data"]
        assert [each["score"] for each in data] == near(wanted)
    answer = client.post("/rerank", json={"query": TEXTS[0], "documents": TEXTS, "top_n": 2}).json()
    order = sorted(range(3), key=lambda idx: -wanted[idx])[:2]
    assert [each["index"] for each in answer["results"]] == order
    body = {"text_1": TEXTS[0], "text_2": "kite " * 100, "truncate_prompt_tokens": -1, "use_activation": False}
    cut = client.post("/score", json=body).json()
    assert cut["usage"]["prompt_tokens"] == 64
    (data,) = client.post("/classify", json={"input": TEXTS[0]}).json()["data"]
    assert (data["label"], data["num_classes"], len(data["probs"])) == ("LABEL_0", 1, 1)


def test_classes(http: Callable[[str], TestClient], folders: dict[str, Path]) -> None:
    with LLM(str(folders["classifies"]), **OPTIONS) as llm:
        wanted = [each.outputs.probs for each in llm.classify(TEXTS, use_tqdm=False)]
    answer = http("classifies").post("/classify", json={"model": "tiny", "input": TEXTS}).json()
    assert [each["probs"] for each in answer["data"]] == [near(each) for each in wanted]
    assert [each["label"] for each in answer["data"]] == [f"LABEL_{each.index(max(each))}" for each in wanted]
    assert answer["usage"]["prompt_tokens"] == 16


def test_classes_of_tokens(http: Callable[[str], TestClient], folders: dict[str, Path]) -> None:
    with LLM(str(folders["names"]), **OPTIONS) as llm:
        wanted = [each.outputs.probs for each in llm.classify_tokens(TEXTS, use_tqdm=False)]
    data = http("names").post("/classify", json={"model": "tiny", "input": TEXTS}).json()["data"]
    for each, probs in zip(data, wanted, strict=True):
        assert each["probs"] == [near(row) for row in probs]
        assert (each["positions"], each["num_classes"]) == ([*range(len(probs))], 4)
        assert each["labels"] == [f"LABEL_{idx}" for idx in range(4)]


@pytest.mark.parametrize(
    ("name", "path", "body", "param", "words"),
    [
        ("embeds", "/v1/embeddings", {"input": "a", "prompt_name": "other"}, "prompt_name", "'query'"),
        ("embeds", "/v1/embeddings", {"input": "a", "dimensions": 33}, "dimensions", "width of the model (32)"),
        ("embeds", "/v1/embeddings", {"input": "kite " * 100}, "input", "102 tokens"),
        ("embeds", "/v1/embeddings", {"input": [60]}, "input", "token ids from 0 to 59"),
        ("embeds", "/v1/embeddings", {"input": []}, "input", "a string, a list"),
        ("embeds", "/v1/embeddings", {"input": "a", "input_type": "sentence"}, "input_type", "one of query, search_"),
        ("embeds", "/v1/embeddings", {"input": "a", "input_type": 5}, "input_type", "a string"),
        (
            "embeds",
            "/v1/embeddings",
            {"input": "a", "input_type": "query", "prompt_name": "query"},
            "input_type",
            "absent where prompt_name",
        ),
        (
            "embeds",
            "/rerank",
            {"query": "a", "documents": ["b"], "query_prompt_name": "other"},
            "query_prompt_name",
            "one of 'query', 'plain'",
        ),
        (
            "scores",
            "/score",
            {"text_1": "a", "text_2": "b", "query_prompt_name": "query"},
            "query_prompt_name",
            "the model has no prompts",
        ),
        (
            "scores",
            "/score",
            {"text_1": "a", "text_2": "b", "document_prompt_name": "query"},
            "document_prompt_name",
            "in one prompt",
        ),
        ("embeds", "/classify", {"input": "a"}, "classify", "no head that classifies"),
        ("scores", "/v1/embeddings", {"input": "a"}, "embeddings", "makes no embeddings"),
        ("scores", "/score", {"text_1": "a", "text_2": "kite " * 100}, "text_2", "tokens"),
        ("scores", "/score", {"text_1": "a", "text_2": "b", "use_activation": 1}, "use_activation", "true or false"),
        ("scores", "/rerank", {"query": "a", "documents": []}, "documents", "at least one"),
        ("scores", "/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 65}, None, "at most 64"),
        ("classifies", "/score", {"text_1": "a", "text_2": "b"}, "score", "3 classes; a score needs one"),
        ("classifies", "/classify", {"input": [["a"]]}, "input", "a string, a list"),
        ("embeds", "/api/embed", {"input": [1, 2]}, None, "a string or a list of strings"),
        ("embeds", "/api/embed", {"input": "a", "dimensions": 0}, None, "dimensions must be"),
        ("embeds", "/api/embeddings", {"prompt": 5}, None, "prompt must be a string"),
        ("embeds", "/api/embed", {"input": "a", "model": "other"}, None, "does not exist"),
    ],
)
def test_bad_bodies_are_refused(
    http: Callable[[str], TestClient], name: str, path: str, body: dict[str, Any], param: str | None, words: str
) -> None:
    response = http(name).post(path, json=body)
    assert response.status_code in (400, 404), response.text
    error = response.json()["error"]
    assert words in (error if isinstance(error, str) else error["message"])
    if param is not None:
        assert error["param"] == param
