"""Connections that send nothing, too slowly, or not HTTP; that read nothing; and too many of them."""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.server.http.listener import RESERVED_DESCRIPTORS, read_max_connections
from tests.server.process import PATIENCE_S, ServerProcess, running
from tests.server.raw import ask, body_of, connect, post, read_all, read_answer, status_of
from tests.server.test_disconnects import num_aborted
from tests.server.test_errors import check_form

LIMIT = 24
SHORT = post("/v1/completions", {"prompt": "Z", "max_tokens": 2}, "Connection: close")
STREAM = {"prompt": "Z", "max_tokens": 4000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def hasty(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that waits for nobody for long, and has few connections."""
    timeouts = ("--receive-timeout", "0.5", "--send-timeout", "1", "--keep-alive-timeout", "0.3")
    flags = ("--num-kv-blocks", "600", "--max-num-seqs", "32", "--max-body-bytes", "1MiB")
    log = tmp_path_factory.mktemp("logs") / "hasty.log"
    with running(folder, log, *flags, *timeouts, "--max-connections", str(LIMIT)) as process:
        # A connection that it closes must not be taken for one to use again.
        process.http.headers["connection"] = "close"
        yield process
        assert "Traceback" not in log.read_text()


# ---- time ----


def test_a_silent_connection_is_closed_without_a_word(hasty: ServerProcess) -> None:
    assert ask(hasty, b"") == b""


# What has come of a long body may take a minute, but not in silence.
LONG_BODY = post("/tokenize", b"x" * (1 << 20))


@pytest.mark.parametrize(
    "raw", [SHORT[:20], SHORT[:90], SHORT[:-1], LONG_BODY[:-1]], ids=["line", "header", "body", "long body"]
)
def test_a_request_that_does_not_arrive_is_a_408(hasty: ServerProcess, raw: bytes) -> None:
    answer = ask(hasty, raw)
    assert status_of(answer) == 408
    assert check_form(body_of(answer), 408)["code"] == "request_timeout"


def test_a_request_that_comes_byte_by_byte_is_given_up_too(hasty: ServerProcess) -> None:
    with connect(hasty) as connection:
        connection.settimeout(0.05)
        answer = b""
        for byte in SHORT:
            try:
                connection.sendall(bytes([byte]))
                answer += connection.recv(1000)
            except TimeoutError:
                continue
            except ConnectionError:
                break
            if answer:
                break
    assert status_of(answer) == 408


def test_a_connection_without_a_next_request_is_closed(hasty: ServerProcess) -> None:
    with connect(hasty) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status_of(read_all(connection)) == 200


def test_what_is_sent_behind_a_refusal_is_not_read_for_ever(hasty: ServerProcess) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    with connect(hasty) as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        deadline = time.monotonic() + PATIENCE_S
        with suppress(ConnectionError):
            while True:
                connection.sendall(chunk)
                assert time.monotonic() < deadline
                time.sleep(0.01)


def test_a_stream_that_nobody_reads_is_ended_and_its_request_aborted(hasty: ServerProcess) -> None:
    with connect(hasty, receive_buffer=4096) as connection:
        connection.sendall(post("/v1/completions", {**STREAM, "max_tokens": 300, "n": 32, "logprobs": 64}))
        hasty.wait_until(lambda status: bool(status["requests"]))
        hasty.wait_until_idle()
        # What the kernel had is there; the end is not.
        assert b"[DONE]" not in read_all(connection)


@pytest.mark.slow
def test_an_answer_that_nobody_reads_is_ended_too(hasty: ServerProcess) -> None:
    body = {"prompt": "Z", "max_tokens": 300, "n": 32, "logprobs": 64, "ignore_eos": True}
    with connect(hasty, receive_buffer=4096) as connection:
        connection.sendall(post("/v1/completions", body))
        # The answer comes at once when it is complete; then nothing is read for longer than the server waits.
        select.select([connection], [], [], 120)
        time.sleep(4)
        assert not read_all(connection).endswith(b"}")


@pytest.mark.slow
def test_a_reader_that_is_slow_but_goes_on_gets_all(folder: Path, tmp_path: Path) -> None:
    with (
        running(folder, tmp_path / "log", "--num-kv-blocks", "600", "--send-timeout", "4") as server,
        connect(server, receive_buffer=4096) as connection,
    ):
        body = {**STREAM, "max_tokens": 100, "n": 32, "logprobs": 64}
        connection.sendall(post("/v1/completions", body, "Connection: close"))
        got, since = b"", time.monotonic()
        while time.monotonic() - since < 12:
            got += connection.recv(20_000)
            time.sleep(0.2)
        assert (got + read_all(connection)).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


# ---- number ----


def test_silent_connections_keep_nobody_out(hasty: ServerProcess) -> None:
    hasty.wait_until_idle()
    with ExitStack() as stack:
        for _ in range(3 * LIMIT):
            stack.enter_context(connect(hasty))
            assert status_of(ask(hasty, SHORT)) == 200


def test_where_all_connections_have_requests_the_next_one_is_told_so(hasty: ServerProcess) -> None:
    hasty.wait_until_idle()
    with ExitStack() as stack:
        streams = []
        for _ in range(LIMIT):
            streams.append(stack.enter_context(connect(hasty)))
            streams[-1].sendall(post("/v1/completions", STREAM))
            assert streams[-1].recv(1000).startswith(b"HTTP/1.1 200")
        answer = ask(hasty, SHORT)
        assert status_of(answer) == 503
        assert check_form(body_of(answer), 503)["code"] == "too_many_connections"
        assert b"\r\nretry-after: 1\r\n" in answer
        assert b"\r\nx-request-id: " in answer
        streams[0].close()
        deadline = time.monotonic() + PATIENCE_S
        while status_of(ask(hasty, SHORT)) != 200:
            assert time.monotonic() < deadline


def test_unfinished_bodies_keep_nobody_out(folder: Path, tmp_path: Path) -> None:
    flags = ("--num-kv-blocks", "300", "--max-connections", "4", "--keep-alive-timeout", "0.2")
    with running(folder, tmp_path / "log", *flags) as server, ExitStack() as stack:
        # One answer goes on; the rest have sent all of their requests but a byte.
        (answering, *uploading) = [stack.enter_context(connect(server)) for _ in range(4)]
        answering.sendall(post("/v1/completions", STREAM))
        assert answering.recv(1000).startswith(b"HTTP/1.1 200")
        for connection in uploading:
            connection.sendall(post("/tokenize", {"prompt": "Z"})[:-1])
            time.sleep(0.05)
        for connection in uploading[:2]:
            held = stack.enter_context(connect(server))
            held.sendall(SHORT[:-1])
            time.sleep(0.3)  # before the next one comes, this one has a request
            answer = read_all(connection)
            assert status_of(answer) == 503
            assert check_form(body_of(answer), 503)["code"] == "too_many_connections"
            assert b"\r\nretry-after: 1\r\n" in answer.lower()
        uploading[2].sendall(b"}")
        assert status_of(read_answer(uploading[2])) == 200
        assert answering.recv(1000)
        assert "Traceback" not in server.log.read_text()


@pytest.mark.slow
def test_the_rest_of_a_refused_body_may_outlast_the_idle_limit(folder: Path, tmp_path: Path) -> None:
    flags = ("--num-kv-blocks", "300", "--keep-alive-timeout", "0.2")
    with running(folder, tmp_path / "log", *flags) as server, connect(server) as connection:
        whole = post("/nothing", b"x" * 1000)
        connection.sendall(whole[:-1])
        assert status_of(read_answer(connection)) == 404
        time.sleep(1.5)
        connection.sendall(whole[-1:] + SHORT)
        assert status_of(read_answer(connection)) == 200


def test_answers_without_the_applications_help_have_an_id_too(hasty: ServerProcess) -> None:
    answers = [ask(hasty, raw) for raw in (SHORT[:20], SHORT[:-1], b"GET\r\n\r\n")]
    assert [status_of(answer) for answer in answers] == [408, 408, 400]
    ids = {line for answer in answers for line in answer.split(b"\r\n") if line.startswith(b"x-request-id: ")}
    assert len(ids) == 3


@pytest.mark.slow
def test_without_descriptors_the_server_waits_and_says_so_once(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "log", "--num-kv-blocks", "300") as server:
        pid = server.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        num_open = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_open, before[1]))
        with ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(connect(server)).sendall(SHORT)
            time.sleep(3)
        assert server.log.read_text().count("no connection can be taken") == 1
        assert len(server.log.read_text()) < 1000
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert status_of(ask(server, SHORT)) == 200
        assert server.stop() == 0


def test_the_limit_of_open_files_bounds_connections() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = read_max_connections(None)
    assert 0 < limit <= soft - RESERVED_DESCRIPTORS
    assert read_max_connections(limit) == limit
    with pytest.raises(ConfigError, match=f"under this process' limit of {soft} open files") as caught:
        read_max_connections(soft)
    assert caught.value.field == "max_connections"
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        read_max_connections(0)


# ---- half-closed connections ----


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_closes_its_half_gets_its_answers(hasty: ServerProcess, streamed: bool) -> None:
    request = post("/v1/completions", {"prompt": "Z", "max_tokens": 300, "ignore_eos": True, "stream": streamed})
    with connect(hasty) as connection:
        connection.sendall(request * 3)
        connection.shutdown(socket.SHUT_WR)
        answers = read_all(connection)
    assert answers.count(b"HTTP/1.1 200") == 3
    assert answers.count(b"[DONE]" if streamed else b'"usage"') == 3


def test_a_half_closed_client_that_waits_is_sent_interim_responses(server: ServerProcess) -> None:
    """They tell a client that is half closed from one that is gone."""
    before = num_aborted(server)
    with connect(server) as connection:
        connection.sendall(post("/v1/completions", {**STREAM, "stream": False, "n": 16}))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1000).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
    server.wait_until_idle()
    assert num_aborted(server) == before + 1


def test_a_half_close_passed_on_by_a_proxy_ends_the_request(
    server: ServerProcess,
) -> None:
    before = num_aborted(server)
    body = {**STREAM, "stream": False, "n": 16}
    with passing_half_closes(server) as (host, port):
        with socket.create_connection((host, port)) as connection:
            connection.sendall(post("/v1/completions", body))
            server.wait_until(lambda status: bool(status["requests"]))
        server.wait_until_idle()
    assert num_aborted(server) == before + 1


@contextmanager
def passing_half_closes(server: ServerProcess) -> Iterator[tuple[str, int]]:
    """Run a proxy that passes bytes and half-closes on, and ends a connection where that fails; yield its address."""

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while part := source.recv(65536):
                sink.sendall(part)
            sink.shutdown(socket.SHUT_WR)
            return
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, upstream = stack.enter_context(listener.accept()[0]), stack.enter_context(connect(server))
                for pair in ((client, upstream), (upstream, client)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)


def test_half_a_request_and_half_a_connection_are_nothing(hasty: ServerProcess) -> None:
    with connect(hasty) as connection:
        connection.sendall(SHORT[:-1])
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""


# ---- where a request ends ----

GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "raw",
    [
        GET + CHUNKED + b"Content-Length: 3\r\n\r\n0\r\n\r\n" + HIDDEN,
        GET + b"Content-Length: 3\r\n" + CHUNKED + b"\r\n0\r\n\r\n" + HIDDEN,
        GET + b"Content-Length: 0\r\n" + CHUNKED + b"\r\n0\r\n\r\n" + HIDDEN,
        GET.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n0\r\n\r\n" + HIDDEN,
        GET + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd" + HIDDEN,
        GET + b"Content-Length: 3, 4\r\n\r\nabcd" + HIDDEN,
        GET + b"Content-Length: +3\r\n\r\nabc" + HIDDEN,
        GET + b"Content-Length: -1\r\n\r\n" + HIDDEN,
        GET + b"Content-Length: 0x3\r\n\r\nabc" + HIDDEN,
        GET + b"Content-Length : 3\r\n\r\nabc" + HIDDEN,
        GET + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        GET + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
        GET + CHUNKED + CHUNKED + b"\r\n0\r\n\r\n" + HIDDEN,
        GET + CHUNKED + b"\r\n-1\r\n\r\n" + HIDDEN,
        GET + CHUNKED + b"\r\n3\nabc\r\n0\r\n\r\n" + HIDDEN,
        GET + b"A: b\0c\r\n\r\n" + HIDDEN,
        GET + b"A: b\rc\r\n\r\n" + HIDDEN,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /version\r\n\r\n",
        b"\r\n\r\n\r\n" + b"x" * 100_000,
    ],
)
def test_ambiguous_framing_is_refused_and_closes_the_connection(hasty: ServerProcess, raw: bytes) -> None:
    answer = ask(hasty, raw)
    *_, last = answer.split(b"HTTP/1.1 ")
    assert last.startswith(b"400")
    assert check_form(body_of(last), 400)["code"] == "invalid_http"
    assert b"hidden" not in answer


@pytest.mark.parametrize("body", [b"zz\r\n", b"1\r\n \r\n" * 2000], ids=["no chunk", "tiny chunks"])
def test_a_bad_body_of_a_request_for_headers_is_refused_in_headers(hasty: ServerProcess, body: bytes) -> None:
    answer = ask(hasty, GET.replace(b"GET", b"HEAD") + CHUNKED + b"\r\n" + body)
    assert status_of(answer) == 400
    assert body_of(answer) == ""


def test_a_body_of_tiny_chunks_is_refused_and_one_of_ordinary_chunks_read(hasty: ServerProcess) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    tiny = b"1\r\n \r\n" * 10_000
    answer = ask(hasty, head + CHUNKED + b"\r\n" + tiny)
    assert check_form(body_of(answer), 400)["code"] == "invalid_http"
    ordinary = (b"64\r\n" + b" " * 100 + b"\r\n") * 5000
    answer = ask(hasty, head + CHUNKED + b"\r\n" + ordinary + b'f\r\n{"prompt": "Z"}\r\n0\r\n\r\n')
    assert status_of(answer) == 200


@pytest.mark.parametrize(
    "raw",
    [
        GET + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        GET + b"Content-Length: 3, 3\r\n\r\nabc",
        GET + b"A: b\r\n c\r\n\r\n",
        GET.replace(b"\r\n", b"\n") + b"\n",
        GET + CHUNKED + b"\r\n3;extension=1\r\nabc\r\n0\r\nTrailer: x\r\n\r\n",
    ],
    ids=["equal lengths", "list of equal lengths", "folded header", "bare line feeds", "extension and trailer"],
)
def test_what_has_one_meaning_by_the_standard_is_read_so(hasty: ServerProcess, raw: bytes) -> None:
    answer = ask(hasty, raw + GET.replace(b"/version", b"/behind") + b"Connection: close\r\n\r\n")
    first, second = answer.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200")
    assert json.loads(body_of(first))["version"]
    assert second.startswith(b"404")
    assert "/behind" in body_of(second)
