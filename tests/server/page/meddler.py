"""A proxy before a real server that spoils answers, as proxies with limits and servers that die do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

import httpx

from tests.server.process import PATIENCE_S

Fault = Literal["", "end", "drop", "html", "gone", "away"]
# What is not forwarded: the proxy frames answers itself.
OWN_HEADERS = {"connection", "content-length", "transfer-encoding", "content-encoding", "date", "server", "host"}
NUM_PIECES = 8


class Meddler:
    """The proxy.

    Args:
        url: its address.

    Attributes:
        fault: what happens to generating requests: nothing; the stream ends early, but properly ("end"), or with its
            connection ("drop"); a page of HTML with status 502 ("html"); no answer at all ("gone"), or none to any
            request ("away").
        sockets: of the open connections.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.fault: Fault = ""
        self.sockets: set[socket.socket] = set()

    def leave(self) -> None:
        """End all connections, and answer nothing until `fault` is changed."""
        self.fault = "away"
        for opened in tuple(self.sockets):
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)


@contextmanager
def meddling(upstream: str) -> Iterator[Meddler]:
    """Run the proxy before a server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            self.forward(b"", "gone" if proxy.fault == "away" else "")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.forward(body, "gone" if proxy.fault == "away" else proxy.fault)

        def forward(self, body: bytes, fault: Fault) -> None:
            self.close_connection = True
            proxy.sockets.add(self.connection)
            try:
                self.answer_for(body, fault)
            except httpx.TransportError:
                pass  # the test is over
            finally:
                proxy.sockets.discard(self.connection)

        def answer_for(self, body: bytes, fault: Fault) -> None:
            if fault == "gone":
                return
            if fault == "html":
                self.answer(502, {"Content-Type": "text/html"}, iter([b"<html><body>Bad gateway</body></html>"]))
                return
            headers = {name: value for name, value in self.headers.items() if name.lower() not in OWN_HEADERS}
            with client.stream(self.command, upstream + self.path, headers=headers, content=body) as got:
                kept = {name: value for name, value in got.headers.items() if name not in OWN_HEADERS}
                self.answer(got.status_code, kept, got.iter_bytes(), fault)

        def answer(self, status: int, headers: dict[str, str], pieces: Iterator[bytes], fault: Fault = "") -> None:
            self.send_response(status)
            for name, value in {**headers, "Transfer-Encoding": "chunked", "Connection": "close"}.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for number, piece in enumerate(pieces):
                    if fault and number == NUM_PIECES:
                        break
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                if fault != "drop":
                    self.wfile.write(b"0\r\n\r\n")
            except OSError:
                pass  # the browser has left

    with (
        httpx.Client(timeout=PATIENCE_S, headers={"Accept-Encoding": "identity"}) as client,
        ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server,
    ):
        server.daemon_threads = True
        proxy = Meddler(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield proxy
        finally:
            server.shutdown()
