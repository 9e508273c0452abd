"""Answers that are passed on while their server is lost: what the client gets."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from quire.fleet.proxy.exchange import Exchange
from quire.fleet.proxy.streams import DONE
from quire.fleet.proxy.upstream import Upstream, UpstreamLost
from tests.serving.test_upstream import talk

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices": []}\n\n'


def passed_on(answer: bytes) -> tuple[str, bytes, list[UpstreamLost]]:
    """Return how an attempt ends whose server sends some bytes and is lost, the client's body, and the losses."""
    lost: list[UpstreamLost] = []

    async def use(upstream: Upstream) -> tuple[str, bytes, list[UpstreamLost]]:
        sent: list[Message] = []
        forever: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        async def receive() -> Message:
            return await forever

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        exchange = Exchange(scope, b"{}", receive, send)
        end = await exchange.attempt(upstream, lambda: "server", lambda: None, lost.append)
        exchange.close()
        assert [message.get("more_body", True) for message in sent[-2:]] == [True, False]
        return end, b"".join(message.get("body", b"") for message in sent), lost

    found, _ = talk([answer], use)
    assert isinstance(found, tuple)
    return found


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize("parts", [(EVENT, DONE), (EVENT + DONE,)])
def test_a_stream_whose_last_event_was_passed_on_is_answered_though_its_server_is_lost(parts: tuple[bytes]) -> None:
    end, body, lost = passed_on(HEAD + b"".join(map(chunk, parts)))
    assert (end, body, len(lost)) == ("answered", EVENT + DONE, 1)


def test_a_stream_that_is_cut_off_ends_with_an_error() -> None:
    end, body, lost = passed_on(HEAD + chunk(EVENT) + chunk(DONE)[:-4])
    assert (end, len(lost)) == ("cut off", 1)
    assert body.startswith(EVENT + b'data: {"error": {')
    assert body.endswith(DONE)
    assert body.count(DONE) == 1
