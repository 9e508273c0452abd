"""What is refused before a body is read."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from quire.server.intake import MAX_LONG_BODIES
from tests.server.process import PATIENCE_S, ServerProcess, running
from tests.server.raw import ask, body_of, connect, post, read_answer, status_of
from tests.server.test_errors import check_form

MAX_BODY = 64 << 10
STREAM = {"prompt": "Z", "max_tokens": 4000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def small(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server for one request at a time, of short bodies."""
    flags = ("--num-kv-blocks", "300", "--max-num-seqs", "1", "--max-queue-len", "1", "--max-body-bytes", "64KiB")
    with running(folder, tmp_path_factory.mktemp("logs") / "small.log", *flags) as process:
        yield process


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_full_queue_refuses_before_the_body_has_come(small: ServerProcess, path: str) -> None:
    small.wait_until_idle()
    with ExitStack() as stack:
        for name in ("num_running", "num_waiting"):
            stack.enter_context(connect(small)).sendall(post("/v1/completions", STREAM))
            small.wait_until(lambda status, name=name: status["engine"][name] == 1)
        connection = stack.enter_context(connect(small))
        connection.sendall(post(path, b"x" * 1000)[:-1])
        answer = read_answer(connection)
        assert status_of(answer) == 429
        assert check_form(body_of(answer), 429)["code"] == "queue_full"
        # All else goes on, and the connection too once the rest is there.
        connection.sendall(b"x" + post("/tokenize", {"prompt": "Z"}))
        assert status_of(read_answer(connection)) == 200
    small.wait_until_idle()


def test_unfinished_bodies_have_a_bound_together(small: ServerProcess) -> None:
    part = post("/tokenize", b"x" * MAX_BODY)[:-1]
    with ExitStack() as stack:
        connections = []
        for _ in range(MAX_LONG_BODIES + 3):
            connections.append(stack.enter_context(connect(small)))
            connections[-1].sendall(part)
        deadline = time.monotonic() + PATIENCE_S
        refused: list[socket.socket] = []
        while len(refused) < 3 and time.monotonic() < deadline:
            refused = select.select(connections, [], [], 0.01)[0]
        assert len(refused) == 3
        for connection in refused:
            answer = read_answer(connection)
            assert status_of(answer) == 503
            assert check_form(body_of(answer), 503)["code"] == "too_many_uploads"
        # A body that is there at once holds up nothing.
        assert status_of(ask(small, post("/tokenize", {"prompt": "Z"}, "Connection: close"))) == 200
        (kept, *_) = (connection for connection in connections if connection not in refused)
        kept.sendall(b"x")
        assert status_of(read_answer(kept)) == 400
    for _ in range(MAX_LONG_BODIES):
        with connect(small) as connection:
            connection.sendall(part)
            connection.sendall(b"x")
            assert status_of(read_answer(connection)) == 400
