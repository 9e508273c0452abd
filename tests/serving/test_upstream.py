"""Connections to servers that misbehave: every end is an answer or a typed loss, and none of them hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from quire.errors import ConfigError
from quire.fleet.proxy.fleet import Fleet
from quire.fleet.proxy.upstream import Upstream, UpstreamLost

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


Use = Callable[[Upstream], Awaitable[object]]


def talk(answers: list[bytes], use: Use, *, closes: bool = True) -> tuple[object, int]:
    """Run a client against a server that sends one of the answers to each request.

    Returns:
        The client's result, and the number of connections.
    """

    async def main() -> tuple[object, int]:
        num_connections = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_connections
            num_connections += 1
            while await reader.read(1 << 16) and answers:
                writer.write(answers.pop(0))
                if closes:
                    break
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            try:
                async with asyncio.timeout(30):
                    return await use(upstream), num_connections
            finally:
                upstream.abort()
                await asyncio.sleep(0.05)

    return asyncio.run(main())


async def fetch(upstream: Upstream) -> tuple[int, bytes]:
    return await upstream.fetch("GET", "/", timeout_s=10)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhe",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * (1 << 17),
    ],
)
def test_an_answer_that_is_not_whole_is_lost(answer: bytes) -> None:
    async def use(upstream: Upstream) -> None:
        with pytest.raises(UpstreamLost):
            await fetch(upstream)

    talk([answer], use)


def test_a_connection_is_used_again_and_replaced_where_the_server_closed_it() -> None:
    async def use(upstream: Upstream) -> list[tuple[int, bytes]]:
        found = [await fetch(upstream)]
        await asyncio.sleep(0.05)
        return [*found, await fetch(upstream), await fetch(upstream)]

    assert talk([WHOLE] * 3, use, closes=False) == ([(200, b"ok")] * 3, 1)
    assert talk([WHOLE] * 3, use) == ([(200, b"ok")] * 3, 3)


def test_an_interim_answer_is_passed_over() -> None:
    assert talk([b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE], fetch)[0] == (200, b"ok")


def test_chunks_that_arrive_together_are_one_part() -> None:
    async def read(upstream: Upstream) -> list[bytes]:
        response = await upstream.request("GET", b"/", ())
        return [part async for part in response.parts()]

    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n3\r\nbcd\r\n2\r\nef\r\n0\r\n\r\n"
    assert talk([answer], read) == ([b"abcdef"], 1)


def test_aborted_connections_lose_their_requests() -> None:
    async def use(upstream: Upstream) -> None:
        task = asyncio.create_task(fetch(upstream))
        await asyncio.sleep(0.2)
        upstream.abort()
        with pytest.raises(UpstreamLost):
            await task

    talk([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok"], use, closes=False)


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://host", "http://", "http://host:x", "http://host/path"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="a server must be an address like"):
        Upstream(url)


@pytest.mark.parametrize("urls", [[], ["http://a", "http://a/"]])
def test_servers_must_be_named_once(urls: list[str]) -> None:
    with pytest.raises(ConfigError, match="to must name servers, each once"):
        Fleet(urls, None, 1.0)
