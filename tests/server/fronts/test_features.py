"""What a server offers beside plain answers, over front processes: one server with all of it, and TLS.

The tests of one process run over fronts too where they use the shared servers (`COUNTS` in `tests/server/conftest.py`):
structured outputs, pooling, keys and the queue among them. Here all of that is behind TLS and keys at once, with tools
and with adapters.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from tests.models.adapters.folders import random_matrices, write_adapter
from tests.server import tool_checkpoint
from tests.server.checkpoint import INNER, LAYERS, WIDTH
from tests.server.process import PATIENCE_S, ServerProcess, running
from tests.server.streams import stream, text_of
from tests.server.test_errors import check_form
from tests.server.test_lifecycle import LONG
from tests.server.test_structured import FORMAT, is_place
from tests.server.tool_answers import ASK, CALLS, CHAT, USER, joined, names_and_arguments, needs_grammars, reasons

pytestmark = pytest.mark.slow
KEY, OPERATOR = "a client's secret", "an operator's secret"
QUEUE_LEN = 4
WIDTHS = {
    f"model.layers.{layer}.mlp.{name}": widths
    for layer in range(LAYERS)
    for name, widths in (("up_proj", (INNER, WIDTH)), ("down_proj", (WIDTH, INNER)))
}
Connect = Callable[[], httpx.Client]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: str(write_adapter(folder / name, random_matrices(WIDTHS, 4, seed, std=2.0)))
        for seed, name in enumerate(("one", "two"))
    }


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Files of a certificate for this host and of its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    found, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", key, "-out", found, "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"], check=True, capture_output=True)
    return found, key


@pytest.fixture(scope="module")
def trusted(certificate: tuple[str, str]) -> ssl.SSLContext:
    """What a client trusts."""
    return ssl.create_default_context(cafile=certificate[0])


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory,
    adapters: dict[str, str],
    certificate: tuple[str, str],
    trusted: ssl.SSLContext,
) -> Iterator[ServerProcess]:
    """A server with two fronts, TLS, keys, a short queue, tools and adapters."""
    folder = tool_checkpoint.save(tmp_path_factory.mktemp("models") / "hermes", "hermes")
    flags = ["--api-server-count", "2", "--num-kv-blocks", "600", "--max-num-seqs", "1"]
    # A stream that waits begins with a ping.
    flags += ["--max-queue-len", str(QUEUE_LEN), "--operator-key", OPERATOR, "--ping-interval", "0.02"]
    flags += ["--ssl-certfile", certificate[0], "--ssl-keyfile", certificate[1]]
    flags += ["--enable-lora", "--lora-modules", f"sql={adapters['one']}", "--allow-runtime-lora-updating"]
    log = tmp_path_factory.mktemp("logs") / "features.log"
    with running(folder, log, *flags, key=KEY, verify=trusted) as process:
        process.http.headers["Authorization"] = f"Bearer {OPERATOR}"
        yield process


@pytest.fixture
def connect(server: ServerProcess, trusted: ssl.SSLContext) -> Iterator[Connect]:
    """Makes clients with a connection of their own, which any of the fronts may have."""
    headers = {"Authorization": f"Bearer {OPERATOR}"}
    with ExitStack() as stack:
        yield lambda: stack.enter_context(
            httpx.Client(base_url=server.url, timeout=PATIENCE_S, headers=headers, verify=trusted)
        )


def text(http: httpx.Client, model: str) -> str:
    """Return the greedy text of a model."""
    answer = http.post("/v1/completions", json={"model": model, "prompt": "Z", "max_tokens": 12, "temperature": 0})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["text"])


def names(http: httpx.Client) -> list[str]:
    return [card["id"] for card in http.get("/v1/models").json()["data"]]


def test_connections_are_encrypted_or_refused(server: ServerProcess) -> None:
    assert server.url.startswith("https://")
    with pytest.raises(httpx.HTTPError):
        httpx.get(server.url.replace("https", "http") + "/health", timeout=PATIENCE_S)
    with pytest.raises(httpx.ConnectError, match="certificate"):
        httpx.get(f"{server.url}/health", timeout=PATIENCE_S)
    assert server.http.get("/health").json()["status"] == "ok"


def test_every_front_asks_for_keys(server: ServerProcess, connect: Connect) -> None:
    for _ in range(4):
        http = connect()
        assert http.get("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
        client = {"Authorization": f"Bearer {KEY}"}
        assert http.get("/v1/models", headers=client).status_code == 200
        assert http.get("/status", headers=client).status_code == 403
        del http.headers["Authorization"]
        assert http.get("/v1/models").status_code == 401
    server.wait_until_idle()


def test_an_adapter_that_one_front_loads_is_a_model_of_all(connect: Connect, adapters: dict[str, str]) -> None:
    clients = [connect() for _ in range(6)]
    plain, sql = text(clients[0], "tiny"), text(clients[0], "sql")
    assert plain != sql
    body = {"lora_name": "new", "lora_path": adapters["two"]}
    assert clients[0].post("/v1/load_lora_adapter", json=body).status_code == 200
    assert clients[1].post("/v1/load_lora_adapter", json=body).status_code == 400
    assert all(names(http) == ["tiny", "sql", "new"] for http in clients)
    texts = {text(http, "new") for http in clients}
    assert len(texts) == 1
    assert not texts & {plain, sql}
    again = {**body, "lora_path": adapters["one"], "load_inplace": True}
    assert clients[2].post("/v1/load_lora_adapter", json=again).status_code == 200
    assert [text(http, "new") for http in clients] == [sql] * len(clients)
    assert clients[3].post("/v1/unload_lora_adapter", json={"lora_name": "new"}).status_code == 200
    for http in clients:
        assert names(http) == ["tiny", "sql"]
        gone = http.post("/v1/completions", json={"model": "new", "prompt": "Z"})
        assert check_form(gone.text, 404)["code"] == "model_not_found"


def test_tools_are_called(server: ServerProcess, trusted: ssl.SSLContext) -> None:
    _, chunks = stream(server, CHAT, ASK)
    assert names_and_arguments(joined(chunks)) == CALLS
    assert (text_of(chunks), reasons(chunks)) == ("I look.", ["tool_calls"])
    tools: Any = ASK["tools"]
    trusting: Any = httpx.Client(verify=trusted)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=OPERATOR, max_retries=0, http_client=trusting) as client:
        messages: Any = USER
        answer = client.chat.completions.create(model="tiny", messages=messages, tools=tools, temperature=0)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == CALLS[0]


@needs_grammars
def test_structured_outputs_are_kept(server: ServerProcess) -> None:
    body = {"messages": USER, "response_format": FORMAT, "max_tokens": 200, "seed": 2}
    whole = server.post(CHAT, body).json()["choices"][0]["message"]["content"]
    assert is_place(whole)
    _, chunks = stream(server, CHAT, body)
    assert text_of(chunks) == whole


def test_pooling_routes_agree_with_each_other(server: ServerProcess) -> None:
    texts = ["ab", "QZ", "abcdefg"]
    data = server.post("/v1/embeddings", {"input": texts}).json()["data"]
    query, *documents = [each["embedding"] for each in data]
    wanted = [sum(a * b for a, b in zip(query, document, strict=True)) for document in documents]
    scores = server.post("/v1/score", {"text_1": texts[0], "text_2": texts[1:]}).json()["data"]
    assert [each["score"] for each in scores] == pytest.approx(wanted, abs=1e-2)
    ranked = server.post("/v1/rerank", {"query": texts[0], "documents": texts[1:]}).json()["results"]
    assert [each["index"] for each in ranked] == sorted((0, 1), key=lambda idx: -wanted[idx])


def test_a_full_queue_is_a_429_of_every_front(server: ServerProcess, connect: Connect) -> None:
    with ExitStack() as stack:
        stack.enter_context(connect().stream("POST", "/v1/completions", json=LONG))
        server.wait_until(lambda status: status["engine"]["num_running"] == 1)
        for count in range(1, QUEUE_LEN + 1):
            stack.enter_context(connect().stream("POST", "/v1/completions", json=LONG))
            server.wait_until(lambda status, count=count: status["engine"]["num_waiting"] == count)  # type: ignore[misc]
        for _ in range(6):
            refused = connect().post("/v1/completions", json={"prompt": "a"})
            assert check_form(refused.text, 429)["code"] == "queue_full"
            assert int(refused.headers["retry-after"]) >= 1
    server.wait_until_idle()
    assert connect().post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
