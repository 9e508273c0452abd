"""Uploads that lack their last bytes, to a server or to a router before one."""

from __future__ import annotations

import select
import socket
import time
from contextlib import ExitStack

from quire.server.requests.body import MAX_LONG_BODIES
from quire.server.state.intake import FREE_BYTES
from tests.server.process import PATIENCE_S, ServerProcess
from tests.server.raw import body_of, connect, post, read_answer, status_of
from tests.server.test_errors import check_form


def check_unfinished_bodies(server: ServerProcess, max_body: int) -> None:
    """Check that unfinished bodies have a bound together, and that nothing else waits for them.

    Args:
        server: the server, or a router before one.
        max_body: its maximum length of a body.
    """
    part = post("/tokenize", b"x" * max_body)[:-1]
    num_places = MAX_LONG_BODIES * max_body // (max_body - 1 - FREE_BYTES)
    with ExitStack() as stack:
        connections = []
        for _ in range(num_places + 3):
            connections.append(stack.enter_context(connect(server)))
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
        # No body waits for those that stand still: neither a short one in two pieces nor a long one.
        for body in (b"x" * FREE_BYTES, b"x" * max_body):
            with connect(server) as connection:
                whole = post("/tokenize", body)
                connection.sendall(whole[:-1])
                time.sleep(0.05)
                connection.sendall(whole[-1:])
                assert status_of(read_answer(connection)) == 400
        (*_, kept) = (connection for connection in connections if connection not in refused)
        kept.sendall(b"x")
        assert status_of(read_answer(kept)) == 400
    for _ in range(num_places):
        with connect(server) as connection:
            connection.sendall(part)
            connection.sendall(b"x")
            assert status_of(read_answer(connection)) == 400
