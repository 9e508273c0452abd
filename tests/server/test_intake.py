"""Requests that are refused before their body is read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Message, Receive, Scope, Send

from quire.platform.bounded.process import MANY_BYTES
from quire.server.requests.body import MAX_LONG_BODIES, BodyReader
from quire.server.requests.errors import ApiError
from quire.server.state.intake import FREE_BYTES, GENERATING, Intake
from tests.server.process import ServerProcess, running
from tests.server.raw import body_of, connect, post, read_answer, status_of
from tests.server.test_errors import check_form
from tests.server.uploads import check_unfinished_bodies

MAX_BODY = 1 << 20
STREAM = {"prompt": "Z", "max_tokens": 4000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def small(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server for one request at a time, of short bodies."""
    flags = ("--num-kv-blocks", "300", "--max-num-seqs", "1", "--max-queue-len", "1", "--max-body-bytes", "1MiB")
    with running(folder, tmp_path_factory.mktemp("logs") / "small.log", *flags) as process:
        yield process


@pytest.mark.parametrize("path", sorted(GENERATING))
def test_a_full_queue_refuses_before_the_body_has_come(small: ServerProcess, path: str) -> None:
    small.wait_until_idle()
    with ExitStack() as stack:
        for name in ("num_running", "num_waiting"):
            stack.enter_context(connect(small)).sendall(post("/v1/completions", STREAM))

            def has_one(status: dict[str, Any], name: str = name) -> bool:
                return bool(status["engine"][name] == 1)

            small.wait_until(has_one)
        connection = stack.enter_context(connect(small))
        connection.sendall(post(path, b"x" * 1000)[:-1])
        answer = read_answer(connection)
        assert status_of(answer) == 429
        assert "queue is full" in body_of(answer)
        if path.startswith("/v1/") and path != "/v1/messages":
            assert check_form(body_of(answer), 429)["code"] == "queue_full"
        # All else goes on, and the connection too once the rest is there.
        connection.sendall(b"x" + post("/tokenize", {"prompt": "Z"}))
        assert status_of(read_answer(connection)) == 200
    small.wait_until_idle()


def test_unfinished_bodies_have_a_bound_together(small: ServerProcess) -> None:
    check_unfinished_bodies(small, MAX_BODY)


class Uploads:
    """Uploads of bodies through an intake, piece by piece, and their results."""

    def __init__(self, max_body_bytes: int) -> None:
        self.num_given_back = 0
        bodies = cast(BodyReader, SimpleNamespace(max_bytes=max_body_bytes, give_back_soon=self._give_back))
        self._intake = Intake(self._read, bodies=bodies, admit=lambda _: None)
        self._pieces: dict[str, asyncio.Queue[bytes]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.codes: dict[str, str] = {}

    def _give_back(self) -> None:
        self.num_given_back += 1

    async def _read(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - what ASGI calls
        try:
            while (await receive())["more_body"]:
                pass
            self.codes[scope["path"]] = "read"
        except ApiError as error:
            self.codes[scope["path"]] = error.code

    async def send(self, name: str, piece: bytes) -> None:
        """Send a piece, or with an empty one the end, and let the intake see it."""
        pieces = self._pieces.setdefault(name, asyncio.Queue())

        async def receive() -> Message:
            body = await pieces.get()
            return {"type": "http.request", "body": body, "more_body": bool(body)}

        if name not in self._tasks:
            scope = {"type": "http", "path": name, "method": "POST"}
            self._tasks[name] = asyncio.create_task(self._intake(scope, receive, cast(Send, None)))
        pieces.put_nowait(piece)
        for _ in range(10):
            await asyncio.sleep(0)

    async def end(self) -> None:
        """End all that are still on their way."""
        for name in self._pieces:
            await self.send(name, b"")
        await asyncio.gather(*self._tasks.values())


def test_at_the_bound_the_upload_that_stands_still_the_longest_ends() -> None:
    async def scenario() -> None:
        uploads = Uploads(1 << 20)
        names = [f"/{number}" for number in range(MAX_LONG_BODIES)]
        for name in names:
            await uploads.send(name, b"x" * (FREE_BYTES + (1 << 20)))
        # All places are taken. The oldest goes on, so the next one is in turn; short ones are not concerned.
        await uploads.send("/short", b"x" * FREE_BYTES)
        await uploads.send("/0", b"x")
        assert uploads.codes == {"/1": "too_many_uploads"}
        await uploads.send("/new", b"x" * (FREE_BYTES + (1 << 20)))
        assert uploads.codes == dict.fromkeys(("/1", "/2"), "too_many_uploads")  # a byte of that place was taken
        await uploads.send("/new", b"x" * (1 << 20))
        assert uploads.codes == dict.fromkeys(("/1", "/2", "/3"), "too_many_uploads")
        await uploads.end()
        assert [uploads.codes[name] for name in ("/0", "/4", "/short", "/new")] == ["read"] * 4
        assert list(uploads.codes.values()).count("too_many_uploads") == 3
        # What was counted is given back.
        for name in names:
            await uploads.send(name + "/again", b"x" * (FREE_BYTES + (1 << 20)))
        assert list(uploads.codes.values()).count("too_many_uploads") == 3
        await uploads.end()

    asyncio.run(scenario())


def test_behind_a_large_body_memory_is_given_back() -> None:
    async def scenario() -> None:
        uploads = Uploads(8 << 20)
        await uploads.send("/short", b"x" * MANY_BYTES)
        await uploads.send("/large", b"x" * (MANY_BYTES + 1))
        assert uploads.num_given_back == 0, "it is not done with yet"
        await uploads.end()
        assert uploads.num_given_back == 1

    asyncio.run(scenario())
