"""The client beside servers that do not behave, over real sockets; and what it is given to send."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from typing import TypeVar

import pytest

from quire.errors import ConfigError, ServerUnreachable
from quire.measurement.bench.client import Client, Outcome, events
from quire.measurement.bench.http_client import Endpoint
from quire.measurement.bench.load import poisson_arrivals
from quire.measurement.bench.trace import TracedRequest
from quire.measurement.bench.workloads import BenchRequest

Result = TypeVar("Result")
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TO_THE_END = b"HTTP/1.1 200 OK\r\n\r\n"
REQUEST = TracedRequest([1, 2], 3)


def against(answer: bytes, use: Callable[[Client], Awaitable[Result]], timeout_s: float = 20.0) -> Result:
    """Return what comes of a client beside a server that gives everybody the same bytes and hangs up."""

    answering: list[asyncio.Task[None] | None] = []

    async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.append(asyncio.current_task())
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        if not answer:
            await reader.read()  # never a word, until the client leaves
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    async def run() -> Result:
        server = await asyncio.start_server(answer_all, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            endpoint = Endpoint.parse(f"http://127.0.0.1:{port}")
            client = Client(endpoint, model=None, api_key=None, timeout_s=timeout_s, ignore_eos=False)
            try:
                return await use(client)
            finally:
                await asyncio.wait([task for task in answering if task is not None])

    return asyncio.run(run())


def outcome_of(answer: bytes, timeout_s: float = 20.0) -> Outcome:
    return against(answer, lambda client: client.send(REQUEST, 0.0), timeout_s)


def chunked(*parts: bytes) -> bytes:
    return CHUNKED + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


def test_an_answer_that_ends_with_the_connection_is_whole() -> None:
    text = b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n'
    outcome = outcome_of(TO_THE_END + text)
    assert (outcome.kind, len(outcome.pieces_s), outcome.num_new) == ("completed", 1, None)
    assert outcome.sent_s <= outcome.pieces_s[0] <= outcome.ended_s


def test_usage_and_the_pieces_of_a_chat_are_read_over_any_cuts() -> None:
    text = (
        b': ping\r\n\r\ndata: {"choices": [{"delta": {"role": "assistant"}}]}\r\n\r\n'
        b'data: {"choices": [{"delta": {"content": "\xc3\xa9"}}], "usage": null}\r\n\r\n'
        b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, '
        b'"prompt_tokens_details": {"cached_tokens": 5}}}\r\n\r\ndata: [DONE]\r\n\r\n'
    )
    for size in (1, 7, len(text)):
        outcome = outcome_of(chunked(*(text[start : start + size] for start in range(0, len(text), size))))
        assert (outcome.kind, len(outcome.pieces_s)) == ("completed", 1)
        assert (outcome.num_prompt, outcome.num_cached, outcome.num_new) == (7, 5, 2)


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b"HTTP/1.1 503 No\r\ncontent-length: 29\r\n\r\n" + b'{"error":{"message":"busy\\n"}}', "HTTP 503", "busy"),
        (b"HTTP/1.1 500 No\r\n\r\nwent wrong", "HTTP 500", "went wrong"),
        (chunked(b'data: {"error": {"message": "no memory"}}\n\n', b"data: [DONE]\n\n"), "stream", "no memory"),
        (chunked(b'data: {"choices": [{"text": "a"}]}\n\n'), "stream", "it ended before the answer did"),
        (chunked(b"data: {oops\n\n"), "stream", "an event is not JSON: '{oops'"),
        (chunked(b'data: {"choices": []}\n\n')[:-5], "connection", "incomplete chunked read"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "connection", "illegal status line"),
    ],
)
def test_what_goes_wrong_is_an_outcome(answer: bytes, kind: str, words: str) -> None:
    outcome = outcome_of(answer)
    assert outcome.kind == kind
    assert words in outcome.detail


def test_silence_is_a_timeout() -> None:
    outcome = outcome_of(b"", timeout_s=0.05)
    assert (outcome.kind, outcome.detail) == ("timeout", "no whole answer after 0.05 s")


def models(*names: str) -> bytes:
    body = '{"data": [' + ", ".join(f'{{"id": "{name}"}}' for name in names) + "]}"
    return b"HTTP/1.1 200 OK\r\n\r\n" + body.encode()


def test_the_only_model_needs_no_name() -> None:
    async def name(client: Client) -> str | None:
        await client.check()
        return client.model

    assert against(models("one"), name) == "one"
    with pytest.raises(ServerUnreachable, match="has 'one', 'two': say which with --model"):
        against(models("one", "two"), name)
    with pytest.raises(ServerUnreachable, match="refuses the API key, or wants one: who are you"):
        against(b"HTTP/1.1 401 No\r\n\r\nwho are you", name)
    with pytest.raises(ServerUnreachable, match="has no list of models: say which with --model"):
        against(b"HTTP/1.1 404 No\r\n\r\n", name)


def test_a_server_that_takes_no_synthetic_request_says_why() -> None:
    with pytest.raises(ServerUnreachable, match="refuses a completion of 3 tokens with HTTP 400: only chats here"):
        against(b"HTTP/1.1 400 No\r\n\r\nonly chats here", lambda client: client.choose_form([1, 2, 3]))


def test_a_prompt_without_token_ids_has_as_many_words() -> None:
    client = Client(Endpoint.parse("http://a"), model="m", api_key=None, timeout_s=1, ignore_eos=True)
    request = BenchRequest([5, 900, 5], 2)
    assert client.synthetic(request) == TracedRequest([5, 900, 5], 2)
    words = client.synthetic(request, takes_ids=False).prompt
    assert isinstance(words, str)
    first, second, third = words.split()
    assert first == third != second


def test_events_may_have_several_lines() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"event: x\ndata: one\nda", b"ta:two\n", b"\n:\n\n\ndata: three\n\n"):
            yield piece

    async def collected() -> list[str]:
        return [data async for data in events(pieces())]

    assert asyncio.run(collected()) == ["one\ntwo", "three"]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", ("http://127.0.0.1:8000", "127.0.0.1", 8000, "", False)),
        ("http://host/", ("http://host", "host", 80, "", False)),
        ("https://me:pass@host/api/v1/", ("https://host/api", "host", 443, "/api", True)),
        ("http://[::1]:81/v1", ("http://[::1]:81", "::1", 81, "", False)),
    ],
)
def test_an_address_is_read(url: str, expected: tuple[object, ...]) -> None:
    assert tuple(Endpoint.parse(url)) == expected


@pytest.mark.parametrize("url", ["", "host:8000", "ftp://host", "http://", "http://host:99999", "http://host/?a=b"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url must be an address like"):
        Endpoint.parse(url)


def test_arrivals_are_poisson_and_can_be_repeated() -> None:
    arrivals = poisson_arrivals(4.0, 4000, seed=3)
    assert arrivals == poisson_arrivals(4.0, 4000, seed=3) != poisson_arrivals(4.0, 4000, seed=4)
    assert (arrivals[0], arrivals == sorted(arrivals), len(arrivals)) == (0.0, True, 4000)
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    # Gaps of such a process have a deviation equal to their mean.
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)
    assert poisson_arrivals(float("inf"), 3, seed=random.randrange(9)) == [0.0, 0.0, 0.0]
