"""The limit of log probabilities that unsent answers may hold together."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.errors import InvalidParameter
from quire.sequences.params import SamplingParams
from quire.server.admission.logprob_budget import MAX_LARGE_ANSWERS, LogprobBudget
from quire.server.requests.errors import ApiError
from tests.server.process import PATIENCE_S, ServerProcess, running

PARAMS = SamplingParams(n=2, logprobs=4, prompt_logprobs=1, max_tokens=10)
# 2 samples of 10 tokens with 5 each, and 3 copies of 2 for each of 8 tokens of the prompts.
NEEDED = 2 * 10 * 5 * 2 + 3 * 2 * 8


def test_an_answer_holds_so_many_at_most() -> None:
    budget = LogprobBudget(NEEDED)
    budget.reserve(PARAMS, [3, 5], 100, 3).release()
    with pytest.raises(InvalidParameter, match=f"at most {NEEDED - 1} .* up to {NEEDED}"):
        LogprobBudget(NEEDED - 1).reserve(PARAMS, [3, 5], 100, 3)


def test_all_answers_hold_so_many_until_they_are_sent() -> None:
    budget = LogprobBudget(NEEDED)
    held = [budget.reserve(PARAMS, [3, 5], 100, 3) for _ in range(MAX_LARGE_ANSWERS)]
    with pytest.raises(ApiError) as caught:
        budget.reserve(PARAMS, [3, 5], 100, 3)
    assert (caught.value.status, caught.value.code) == (429, "too_many_logprobs")
    budget.reserve(SamplingParams(), [3, 5], 100, 3)
    for _ in range(2):
        held[0].release()
    budget.reserve(PARAMS, [3, 5], 100, 3)
    with pytest.raises(ApiError):
        budget.reserve(PARAMS, [3, 5], 100, 3)


@pytest.fixture(scope="module")
def server_of_few(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose answers hold few log probabilities."""
    flags = ("--num-kv-blocks", "300", "--max-request-logprobs", "600000", "--send-timeout", "600")
    with running(folder, tmp_path_factory.mktemp("logs") / "few.log", *flags) as process:
        yield process


def ask(server: ServerProcess, body: dict[str, Any]) -> socket.socket:
    """Send a request whose answer nobody reads yet."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    client = socket.create_connection((host, int(port)))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"  # noqa: E501
    client.sendall(f"{head}\r\n\r\n".encode() + raw)
    return client


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True])
def test_unread_answers_are_counted_until_their_clients_leave(server_of_few: ServerProcess, is_stream: bool) -> None:
    # Some 10 MB as JSON, which no buffer of the system takes.
    body = {"prompt": [[5, idx, *[6] * 2998] for idx in range(3)], "max_tokens": 1, "echo": True, "logprobs": 64}
    clients = [ask(server_of_few, body | {"stream": is_stream}) for _ in range(MAX_LARGE_ANSWERS)]
    for client in clients:  # its answer has begun
        client.settimeout(PATIENCE_S)
        assert client.recv(1, socket.MSG_PEEK)
    answer = server_of_few.post("/v1/completions", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_logprobs")
    assert answer.headers["retry-after"]
    assert server_of_few.post("/v1/completions", {"prompt": [5], "max_tokens": 2}).status_code == 200
    for client in clients:
        client.close()
    server_of_few.wait_until_idle()
    server_of_few.wait_until(lambda _: server_of_few.post("/v1/completions", body).status_code == 200)
