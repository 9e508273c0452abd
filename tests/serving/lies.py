"""Answers of servers that lie, each a function of a seed and a number: honest ones that were damaged somewhere."""

from __future__ import annotations

import json
from random import Random
from typing import NamedTuple

COMPLETIONS, MESSAGES, OLLAMA = "/v1/completions", "/v1/messages", "/api/generate"
# What is asked, and the events that answer it.
STREAMS = {
    COMPLETIONS: [b'data: {"choices": [{"text": "a"}]}', b"data: [DONE]"],
    MESSAGES: [b'event: ping\ndata: {"type": "ping"}', b'event: message_stop\ndata: {"type": "message_stop"}'],
    OLLAMA: [b'{"response": "a", "done": false}', b'{"response": "", "done": true}'],
}
STATUS_LINES = (
    *(b"HTTP/1.1 200", b"HTTP/1.1 99 x", b"HTTP/1.1 000 x", b"HTTP/1.1 600 x", b"HTTP/1.1 999 x", b"HTTP/1.1 2000 x"),
    *(b"HTTP/1.1 -200 OK", b"HTTP/1.1 OK 200", b"HTTP/2 200 OK", b"HTTP/0.9 200 OK", b"HTTP/1.0 200 OK", b"200 OK"),
    *(b"ICY 200 OK", b"http/1.1 200 ok", b" HTTP/1.1 200 OK", b"HTTP/1.1  200 OK", b"HTTP/1.1 200 \0", b"", b"\0" * 50),
    *(b"HTTP/1.1 204 No Content", b"HTTP/1.1 304 Not Modified", b"HTTP/1.1 101 Switching Protocols", b"SSH-2.0-x"),
    *(b"HTTP/1.1 100 Continue", b"HTTP/1.1 400 Bad", b"HTTP/1.1 500 x", b"HTTP/1.1 503 x", b"HTTP/1.1 429 x"),
)
LINES = (
    *(b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 5, 6", b"Content-Length: 0x5", b"Content-Length:"),
    *(b"Content-Length: " + b"9" * 30, b"Content-Length: 1000000", b"Transfer-Encoding: chunked"),
    *(b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked, chunked"),
    *(b"Connection: close", b"Connection: content-type, x-quire-replica", b"Upgrade: h2c", b"Trailer: x", b"X y: z"),
    *(b": x", b"x", b"X: \0", b"X: a\rSet-Cookie: b", b" folded", b"X: " + b"y" * 20_000, b"\xff: \xfe", b"X: \xff"),
    *(b"X-Request-Id: other", b"X-Quire-Replica: other", b"Content-Encoding: gzip", b"Date: x", b"Keep-Alive: 5"),
    *(b"Content-Type: text/event-stream", b"Content-Type: application/x-ndjson", b"Content-Type: \0"),
)
TOKENS = (
    *(b"[" * 60_000, b"[" * 5_000_000, b"{}", b"[]", b"null", b'{"tokens": 5}', b'{"tokens": "abc"}', b"\0" * 100),
    *(b'{"tokens": [-1]}', b'{"tokens": [1.5]}', b'{"tokens": [99999999999]}', b'{"tokens": [[1]]}', b'{"tokens": {}}'),
    *(b'{"tokens": [1, 2], "adapter": 5, "cache_salt": {}}', b'{"tokens": [%b1]}' % (b"1," * 500_000), b"{", b""),
)
ENDS = ("close", "close", "hold", "reset")


class Lie(NamedTuple):
    """One lie, and the request that it answers.

    Args:
        number: with the seed, it makes the same lie again.
        path: route of the request.
        is_stream: True if a stream is asked for.
        parts: answer to the request, as it is sent.
        end: what the server does after it: "close", "hold" the connection open, or "reset" it.
        tokens: answer to `POST /prompt_tokens`, without its head.
        kv_sources: the same to `GET /kv_event_sources`.
    """

    number: int
    path: str
    is_stream: bool
    parts: list[bytes]
    end: str
    tokens: bytes
    kv_sources: bytes


def whole(body: bytes, content_type: bytes = b"application/json") -> bytes:
    """Return an honest answer."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (content_type, len(body)) + body


def make_lie(seed: int, number: int) -> Lie:
    """Return a lie."""
    rng = Random(f"{seed}-{number}")
    path, is_stream = rng.choice(list(STREAMS)), rng.random() < 0.6
    head, body = _honest(rng, path, is_stream=is_stream)
    raw = _damaged(rng, head, body)
    cuts = sorted(rng.randrange(len(raw) + 1) for _ in range(rng.choice([0, 0, 1, 3])))
    parts = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    tokens = rng.choice(TOKENS) if rng.random() < 0.5 else b'{"tokens": [1, 2, 3]}'
    return Lie(number, path, is_stream, parts, rng.choice(ENDS), tokens, rng.choice([*TOKENS[:-3], b'{"0": {}}']))


def _honest(rng: Random, path: str, *, is_stream: bool) -> tuple[list[bytes], bytes]:
    """Return the lines of a head, and a body."""
    if not is_stream:
        body = json.dumps({"choices": [{"text": "x" * rng.choice([1, 100, 100_000])}]}).encode()
        return [b"HTTP/1.1 200 OK", b"Content-Type: application/json", b"Content-Length: %d" % len(body)], body
    is_lines = path == OLLAMA
    line_end = b"\n" if is_lines else rng.choice([b"\n", b"\n", b"\r\n", b"\r"])
    events = [event.replace(b"\n", line_end) + line_end * (1 if is_lines else 2) for event in STREAMS[path]]
    events = [events[0]] * rng.choice([0, 1, 3]) + events[1:]
    kind = b"application/x-ndjson" if is_lines else b"text/event-stream"
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
    return [b"HTTP/1.1 200 OK", b"Content-Type: " + kind, b"Transfer-Encoding: chunked"], chunks + b"0\r\n\r\n"


def _damaged(rng: Random, lines: list[bytes], body: bytes) -> bytes:
    """Return an answer with one to three faults."""
    before = after = b""
    for _ in range(rng.choice([1, 1, 2, 3])):
        kind = rng.randrange(9)
        if kind == 0:
            lines[0] = rng.choice(STATUS_LINES)
        elif kind == 1:
            lines.insert(rng.randrange(1, len(lines) + 1), rng.choice(LINES))
        elif kind == 2 and len(lines) > 1:
            del lines[rng.randrange(1, len(lines))]
        elif kind == 3:
            after += rng.choice([b"x", b"\0", b"\r\n", whole(b"another"), rng.randbytes(20)])
        elif kind == 4:
            before += rng.choice([b"HTTP/1.1 103 x\r\n\r\n" * 1000, b"HTTP/1.1 100 x\r\n\r\n", b"\r\n", whole(b"0")])
        elif kind == 5 and body:
            place = rng.randrange(len(body))
            body = body[:place] + rng.choice([b"", rng.randbytes(1), b"\0", b"f" * 20]) + body[place + 1 :]
        elif kind == 6:
            body = body[: rng.randrange(len(body) + 1)]
        elif kind == 7:
            lines += [b"X-%d: y" % idx for idx in range(rng.choice([50, 5000]))]
    raw = before + b"\r\n".join([*lines, b"", b""]) + body + after
    if rng.random() < 0.2:
        return raw[: rng.randrange(len(raw) + 1)]
    if rng.random() < 0.2 and raw:
        changed = bytearray(raw)
        for _ in range(rng.choice([1, 3])):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)
    return raw
