"""A server of `--replicas` that has no model: it starts at once, and ends where a file says so."""

from __future__ import annotations

import json
import os
import socket
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Final

from quire.fleet.local.settings import LocalSettings

# File in the folder of the model: exit codes of servers, by their names.
FAILING: Final = "failing.json"


class Handler(BaseHTTPRequestHandler):
    """Answers every request with its process id."""

    def do_GET(self) -> None:
        """Answer a request."""
        body = json.dumps({"status": "ok", "pid": os.getpid()}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class SmallServer(HTTPServer):
    """A server on a socket that is bound already."""

    def server_bind(self) -> None:
        """Do nothing."""


def serve(listener: int) -> None:
    """Be a server, unless the file says that this one ends at once."""
    name, text = json.load(sys.stdin)
    folder = LocalSettings.from_json(text).engine.model.model
    failing = Path(folder) / FAILING
    if failing.exists() and name in (codes := json.loads(failing.read_text())):
        sys.exit(codes[name])
    server = SmallServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket = socket.socket(fileno=listener)
    server.server_activate()
    server.serve_forever()
