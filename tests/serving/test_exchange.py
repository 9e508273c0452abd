"""Answers that are passed on while their server is lost: what the client gets."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import NamedTuple

import pytest
from starlette.types import Message

from quire.fleet.proxy import streams
from quire.fleet.proxy.exchange import MAX_WHOLE_BYTES, REPLICA_HEADER, Exchange
from quire.fleet.proxy.streams import DONE
from quire.fleet.proxy.upstream import Upstream, UpstreamDamaged, UpstreamLost
from tests.serving.test_upstream import talk

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices": []}\n\n'


class Passed(NamedTuple):
    """How an attempt ends.

    Args:
        end: its name.
        status: status that the client gets; 0 for none.
        body: body that the client gets.
        headers: headers that the client gets.
        lost: losses of the server.
    """

    end: str
    status: int
    body: bytes
    headers: list[tuple[bytes, bytes]]
    lost: list[UpstreamLost]


def passed_on(answer: bytes, path: str = "/v1/completions") -> Passed:
    """Return how an attempt ends whose server sends some bytes and closes the connection."""
    lost: list[UpstreamLost] = []

    async def use(upstream: Upstream) -> Passed:
        sent: list[Message] = []
        forever: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        async def receive() -> Message:
            return await forever

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        exchange = Exchange(scope, b"{}", receive, send)
        try:
            end = await exchange.attempt(upstream, lambda: "server", lambda _: None, lost.append)
        except ConnectionAbortedError:
            end = "aborted"
        exchange.close()
        if end in ("answered", "cut off"):
            assert [message.get("more_body", True) for message in sent[-2:]] == [True, False]
        body = b"".join(message.get("body", b"") for message in sent)
        first = sent[0] if sent else {}
        return Passed(end, first.get("status", 0), body, first.get("headers", []), lost)

    passed, _ = talk([answer], use)
    assert isinstance(passed, Passed)
    return passed


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize("parts", [(EVENT, DONE), (EVENT + DONE,)])
def test_a_stream_whose_last_event_was_passed_on_is_answered_though_its_server_is_lost(parts: tuple[bytes]) -> None:
    passed = passed_on(HEAD + b"".join(map(chunk, parts)))
    assert (passed.end, passed.body, len(passed.lost)) == ("answered", EVENT + DONE, 1)


def check_cut_off(passed: Passed) -> None:
    """Check that a stream ends with an error after its first event."""
    assert (passed.end, passed.status, len(passed.lost)) == ("cut off", 200, 1)
    assert passed.body.startswith(EVENT + b'data: {"error": {')
    assert passed.body.endswith(DONE)
    assert passed.body.count(DONE) == 1


def test_a_stream_that_is_cut_off_ends_with_an_error() -> None:
    check_cut_off(passed_on(HEAD + chunk(EVENT) + chunk(DONE)[:-4]))


@pytest.mark.parametrize("rest", [b"0\r\n\r\n", chunk(EVENT[:-3]) + b"0\r\n\r\n", b"zz\r\n"])
def test_a_stream_without_its_last_event_or_that_is_damaged_ends_with_an_error(rest: bytes) -> None:
    check_cut_off(passed_on(HEAD + chunk(EVENT) + rest))


def test_a_stream_without_an_event_may_be_answered_by_another_server() -> None:
    assert passed_on(HEAD + b"0\r\n\r\n")[:3] == ("damaged", 0, b"")


def test_a_stream_of_another_route_needs_no_last_event() -> None:
    assert passed_on(HEAD + chunk(EVENT) + b"0\r\n\r\n", "/kv/map")[:3] == ("answered", 200, EVENT)


def test_an_event_that_never_ends_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_EVENT_BYTES", 1 << 20)
    passed = passed_on(HEAD + chunk(EVENT) + chunk(b"data: " + b"x" * (2 << 20)))
    check_cut_off(passed)
    assert isinstance(passed.lost[0], UpstreamDamaged)


WHOLE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def test_an_answer_of_which_a_part_is_missing_may_be_another_servers() -> None:
    for size in (10, MAX_WHOLE_BYTES):
        assert passed_on(WHOLE_HEAD % size + b"x" * (size - 1))[:3] == ("lost", 0, b"")
        assert passed_on(WHOLE_HEAD % size + b"x" * size)[:3] == ("answered", 200, b"x" * size)


def test_a_long_answer_of_which_a_part_is_missing_is_not_whole_for_the_client() -> None:
    size = MAX_WHOLE_BYTES + (1 << 20)
    passed = passed_on(WHOLE_HEAD % size + b"x" * (size - 1))
    assert (passed.end, passed.status) == ("aborted", 200)
    assert len(passed.body) < size


def test_headers_of_the_servers_connection_are_not_passed_on() -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\nX-End: 2\r\nX-Quire-Replica: other\r\n"
    passed = passed_on(head + b"Keep-Alive: 5\r\nX-Request-Id: other\r\nContent-Length: 2\r\n\r\nok")
    assert passed.headers == [(b"x-end", b"2"), (b"content-length", b"2"), (REPLICA_HEADER, b"server")]


def test_an_exchange_that_has_ended_is_freed_without_the_collector() -> None:
    """Its body may have megabytes, and a full pass of the collector may be minutes away."""

    async def use(upstream: Upstream) -> bool:
        async def receive() -> Message:
            forever: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
            return await forever

        async def send(message: Message) -> None:
            pass

        exchange = Exchange({"type": "http", "method": "POST", "path": "/", "headers": []}, b"{}", receive, send)
        await exchange.attempt(upstream, lambda: "server", lambda _: None, lambda _: None)
        exchange.close()
        freed = weakref.ref(exchange)
        del exchange
        await asyncio.sleep(0.01)  # the task that waits for the client to leave ends
        return freed() is None

    gc.disable()
    try:
        assert talk([HEAD + chunk(EVENT + DONE) + b"0\r\n\r\n"], use)[0]
    finally:
        gc.enable()
