"""The HTTP parser on requests that are slow to parse: tiny chunks and long heads."""

from __future__ import annotations

import h11
import pytest

from quire.server.http.connection import FREE_CHUNKS, MIN_MEAN_CHUNK, StrictConnection
from quire.server.http.strict import MAX_HEAD

# What asyncio reads at a time; the parser goes through all of it in one turn of the event loop.
READ = 256 << 10
CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunks(num_bytes: int, count: int) -> bytes:
    """Return chunks of the same length."""
    return (b"%x\r\n" % num_bytes + b" " * num_bytes + b"\r\n") * count


def num_events(*reads: bytes) -> int:
    """Return how many events the parser makes of bytes that arrive in some reads."""
    parser, count = StrictConnection(h11.SERVER), 0
    for read in reads:
        parser.receive_data(read)
        while parser.next_event() not in (h11.NEED_DATA, h11.PAUSED):
            count += 1
    return count


@pytest.mark.parametrize("num_bytes", [1, 2, 7, 32, MIN_MEAN_CHUNK - 1])
def test_a_body_of_small_chunks_is_refused_before_many_are_read(num_bytes: int) -> None:
    allowed = FREE_CHUNKS / (1 - num_bytes / MIN_MEAN_CHUNK)  # each earns a part of the next
    with pytest.raises(h11.RemoteProtocolError, match="chunks of less"):
        num_events(CHUNKED + chunks(num_bytes, int(allowed) + 2))


def test_no_read_holds_up_the_event_loop_for_many_chunks() -> None:
    one = chunks(MIN_MEAN_CHUNK, 1)
    assert num_events(CHUNKED, one * (READ // len(one))) <= READ // MIN_MEAN_CHUNK


@pytest.mark.parametrize("num_bytes", [100, 1000, 65536])
def test_a_long_body_of_ordinary_chunks_is_read(num_bytes: int) -> None:
    count = (2 << 20) // num_bytes
    assert num_events(CHUNKED, chunks(num_bytes, count), b"0\r\n\r\n") == count + 2


def test_a_few_small_chunks_are_read() -> None:
    assert num_events(CHUNKED, chunks(1, FREE_CHUNKS), b"0\r\n\r\n") == FREE_CHUNKS + 2


def test_a_request_behind_another_has_free_chunks_of_its_own() -> None:
    parser = StrictConnection(h11.SERVER)
    for _ in range(3):
        parser.receive_data(CHUNKED + chunks(1, FREE_CHUNKS) + b"0\r\n\r\n")
        while not isinstance(parser.next_event(), h11.EndOfMessage):
            pass
        parser.send(h11.Response(status_code=200, headers=[(b"content-length", b"0")]))
        parser.send(h11.EndOfMessage())
        parser.start_next_cycle()


@pytest.mark.parametrize("framing", [b"Transfer-Encoding: chunked\r\n\r\n2000\r\n", b"Content-Length: 8192\r\n\r\n"])
def test_a_body_that_comes_byte_by_byte_is_not_one_of_small_chunks(framing: bytes) -> None:
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\n" + framing
    assert num_events(head, *[b" "] * 8192) >= 8192


@pytest.mark.parametrize("num_reads", [1, 20])
def test_headers_have_a_bound_however_they_arrive(num_reads: int) -> None:
    head = b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a:b\r\n" * 20_000 + b"\r\n"
    length = len(head) // num_reads
    with pytest.raises(h11.RemoteProtocolError):
        num_events(*(head[start : start + length] for start in range(0, len(head), length)))


def test_headers_within_the_bound_are_read_whatever_is_behind_them() -> None:
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\na: "
    assert num_events(head + b"b" * (MAX_HEAD - len(head) - 4) + b"\r\n\r\n" + b"x" * 200_000) == 3


def test_chunks_are_framed_as_h11_frames_them() -> None:
    answers = []
    for kind in (StrictConnection, h11.Connection):
        parser = kind(h11.SERVER)
        parser.receive_data(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        parser.next_event()
        parser.next_event()
        events = [h11.Response(status_code=200, headers=[("date", "now")], reason=b"OK")]
        events += [h11.Data(data=data) for data in (b"a", b"", b"x" * 300)]  # type: ignore[misc]
        answers.append([parser.send(event) for event in (*events, h11.EndOfMessage())])
        assert parser.our_state is h11.DONE
    assert answers[0] == answers[1]
    assert answers[0][1:4] == [b"1\r\na\r\n", b"", b"12c\r\n" + b"x" * 300 + b"\r\n"]


def test_a_body_of_known_length_is_not_chunked() -> None:
    parser = StrictConnection(h11.SERVER)
    parser.receive_data(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    parser.next_event()
    parser.next_event()
    parser.send(h11.Response(status_code=200, headers=[("content-length", "2")]))
    assert parser.send(h11.Data(data=b"ab")) == b"ab"
    with pytest.raises(h11.LocalProtocolError):
        parser.send(h11.Data(data=b"c"))
