"""Bytes to and from a server, as no client library would send them."""

from __future__ import annotations

import json
import socket
from typing import Any

from tests.server.process import PATIENCE_S, ServerProcess


def connect(server: ServerProcess, *, receive_buffer: int | None = None) -> socket.socket:
    """Open a connection.

    Args:
        server: to connect to.
        receive_buffer: bytes that the kernel keeps of what is not read, about; None for its default.
    """
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.socket()
    connection.settimeout(PATIENCE_S)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((host, int(port)))
    return connection


def post(path: str, body: Any, *headers: str) -> bytes:
    """Return a whole request."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(raw)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + raw


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes the connection, in whatever way."""
    got = b""
    try:
        while part := connection.recv(1 << 16):
            got += part
    except ConnectionError:
        pass
    return got


def ask(server: ServerProcess, raw: bytes) -> bytes:
    """Send bytes on a connection of their own, and return all that comes until the server closes it."""
    with connect(server) as connection:
        connection.sendall(raw)
        return read_all(connection)


def status_of(answer: bytes) -> int:
    """Return the status of the first answer; 0 where there is none."""
    return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0


def read_answer(connection: socket.socket) -> bytes:
    """Read one answer that has a length; what is there when the connection ends or times out where it has none."""
    got = b""
    while True:
        head, end, body = got.partition(b"\r\n\r\n")
        if end:
            lengths = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            if not lengths or len(body) >= int(lengths[0]):
                return got
        part = connection.recv(1 << 16)
        if not part:
            return got
        got += part


def body_of(answer: bytes) -> str:
    """Return the body of an answer that came with a length."""
    return answer.partition(b"\r\n\r\n")[2].decode()
