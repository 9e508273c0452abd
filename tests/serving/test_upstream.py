"""Connections to servers that misbehave: every end is an answer or a typed loss, and none of them hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from quire.errors import ConfigError
from quire.fleet.proxy.answers import MAX_HEADERS, MAX_INTERIM
from quire.fleet.proxy.fleet import Fleet
from quire.fleet.proxy.upstream import MAX_FETCHED, Upstream, UpstreamDamaged, UpstreamLost

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
    ],
)
def test_an_answer_that_is_not_whole_is_lost(answer: bytes) -> None:
    async def use(upstream: Upstream) -> None:
        with pytest.raises(UpstreamLost) as caught:
            await fetch(upstream)
        assert not isinstance(caught.value, UpstreamDamaged)

    talk([answer], use)


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n"
DAMAGED = {
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n",
    "no version": b"200 OK\r\ncontent-length: 2\r\n\r\nok",
    "an unknown version": b"HTTP/3.7 200 OK\r\ncontent-length: 2\r\n\r\nok",
    "a long head": b"HTTP/1.1 200 OK\r\nx: " + b"y" * (1 << 17),
    "a long head in many headers": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 9999 + b"content-length: 2\r\n\r\nok",
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * MAX_HEADERS + b"content-length: 2\r\n\r\nok",
    "a head of NUL": b"HTTP/1.1 200 OK\r\nx: \0\r\ncontent-length: 2\r\n\r\nok",
    "NUL alone": b"\0" * 100,
    "a name with a space": b"HTTP/1.1 200 OK\r\nx y: z\r\ncontent-length: 2\r\n\r\nok",
    "a CR in a value": b"HTTP/1.1 200 OK\r\nx: y\rset-cookie: z\r\ncontent-length: 2\r\n\r\nok",
    "both lengths": CHUNKED + b"content-length: 5\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok",
    "no length": b"HTTP/1.1 200 OK\r\n\r\nok",
    "no length, as in HTTP/1.0": b"HTTP/1.0 200 OK\r\n\r\nok",
    "chunks in HTTP/1.0": CHUNKED.replace(b"1.1", b"1.0") + b"\r\n2\r\nok\r\n0\r\n\r\n",
    "another coding": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a length that is no number": b"HTTP/1.1 200 OK\r\ncontent-length: 0x2\r\n\r\nok",
    "a negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\nok",
    "a chunk without a number": CHUNKED + b"\r\nzz\r\nok\r\n0\r\n\r\n",
    "a chunk longer than it says": CHUNKED + b"\r\n2\r\nokay\r\n0\r\n\r\n",
    "a chunk of too many digits": CHUNKED + b"\r\n" + b"f" * 40 + b"\r\n",
    "status 999": b"HTTP/1.1 999 Odd\r\ncontent-length: 2\r\n\r\nok",
    "status 600": b"HTTP/1.1 600 Odd\r\ncontent-length: 2\r\n\r\nok",
    "status 099": b"HTTP/1.1 099 Odd\r\ncontent-length: 2\r\n\r\nok",
    "a switch of the protocol": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "a flood of interim responses": b"HTTP/1.1 103 Early Hints\r\n\r\n" * (MAX_INTERIM + 1) + WHOLE,
    "bytes beyond its end": WHOLE + b"x",
    "a second answer": WHOLE + WHOLE,
    "bytes beyond an answer without a body": b"HTTP/1.1 204 No Content\r\n\r\nok",
    "bytes beyond the last chunk": CHUNKED + b"\r\n0\r\n\r\nok",
}


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("answer", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_answer_is_refused_and_its_connection_is_used_no_more(answer: bytes, *, closes: bool) -> None:
    async def use(upstream: Upstream) -> object:
        with pytest.raises(UpstreamDamaged):
            await fetch(upstream)
        return await fetch(upstream)

    assert talk([answer, WHOLE], use, closes=closes) == ((200, b"ok"), 2)


@pytest.mark.parametrize("excess", [0, 1])
def test_an_answer_to_the_proxy_itself_has_a_limit(excess: int) -> None:
    async def use(upstream: Upstream) -> int:
        return len((await fetch(upstream))[1])

    body = b"x" * (MAX_FETCHED + excess)
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    if excess:
        with pytest.raises(UpstreamDamaged, match=f"the answer to / has more than {MAX_FETCHED} bytes"):
            talk([answer], use)
    else:
        assert talk([answer], use)[0] == MAX_FETCHED


@pytest.mark.parametrize("count", [0, 1, MAX_INTERIM])
def test_some_interim_responses_are_passed_over(count: int) -> None:
    assert talk([b"HTTP/1.1 100 Continue\r\n\r\n" * count + WHOLE], fetch)[0] == (200, b"ok")


def test_an_answer_to_connect_is_no_tunnel() -> None:
    async def use(upstream: Upstream) -> None:
        response = await upstream.request("CONNECT", b"host:80", ())
        with pytest.raises(UpstreamDamaged, match="switches to another protocol"):
            _ = [part async for part in response.parts()]

    talk([WHOLE], use, closes=False)


def test_answers_without_a_body_need_no_length() -> None:
    async def use(upstream: Upstream) -> list[tuple[int, bytes]]:
        found = [await upstream.fetch(method, "/", timeout_s=10) for method in ("GET", "GET", "HEAD")]
        return [*found, await fetch(upstream)]

    heads = [b"HTTP/1.1 %d x\r\n\r\n" % status for status in (204, 304, 200)]
    expected = [(204, b""), (304, b""), (200, b""), (200, b"ok")]
    assert talk([*heads, WHOLE], use, closes=False) == (expected, 1)


def test_an_answer_that_no_request_has_asked_for_is_never_that_of_the_next_one() -> None:
    async def main() -> None:
        num_connections = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_connections
            num_connections += 1
            await reader.read(1 << 16)
            writer.write(WHOLE)
            await asyncio.sleep(0.05)
            writer.write(WHOLE.replace(b"ok", b"no"))
            await reader.read(1 << 16)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            for number in range(1, 4):
                assert await fetch(upstream) == (200, b"ok")
                await asyncio.sleep(0.2)
                assert num_connections == number
            upstream.abort()
            await asyncio.sleep(0.05)

    asyncio.run(main())


def test_an_answer_before_the_request_is_refused() -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(WHOLE)
            await reader.read(1 << 16)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            connection = await upstream._connect()
            await asyncio.sleep(0.05)
            with pytest.raises(UpstreamDamaged, match="no request asked for"):
                await connection.exchange("GET", b"/", (), b"")
            await asyncio.sleep(0.05)

    asyncio.run(main())


@pytest.mark.parametrize("interim", [b"", b"HTTP/1.1 102 Processing\r\n\r\n"])
def test_an_answer_that_comes_before_the_whole_request_was_sent_is_the_answer(interim: bytes) -> None:
    """A server may refuse a body that it does not read; the rest is not sent, and the connection is closed."""
    refusal = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno"

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(interim + refusal)
            await asyncio.sleep(0.5)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 16) as server:
            upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            answer = await upstream.fetch("POST", "/", (), b"x" * (64 << 20), timeout_s=20)
            assert answer == (413, b"no")
            assert not upstream._idle
            assert not upstream._open
            await asyncio.sleep(0.6)

    asyncio.run(main())


def test_a_connection_is_used_again_and_replaced_where_the_server_closed_it() -> None:
    async def use(upstream: Upstream) -> list[tuple[int, bytes]]:
        found = [await fetch(upstream)]
        await asyncio.sleep(0.05)
        return [*found, await fetch(upstream), await fetch(upstream)]

    assert talk([WHOLE] * 3, use, closes=False) == ([(200, b"ok")] * 3, 1)
    assert talk([WHOLE] * 3, use) == ([(200, b"ok")] * 3, 3)


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
