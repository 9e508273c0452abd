"""A running server whose process gets no further descriptors: what it serves then, and how it recovers."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.kvstore.descriptors import free_descriptors
from tests.server.process import PATIENCE_S, ServerProcess, running
from tests.waiting import wait_for

pytestmark = pytest.mark.slow  # a server starts

BODY: dict[str, Any] = {"prompt": [*range(30, 80)], "max_tokens": 4, "temperature": 0}
GRAMMAR = {**BODY, "structured_outputs": {"regex": "(ab){1,3}"}}


def metric(server: ServerProcess, name: str) -> float:
    (value,) = re.findall(rf"^vllm:{name}{{[^}}]*}} (\S+)$", server.http.get("/metrics").text, re.MULTILINE)
    return float(value)


def test_a_server_without_descriptors_serves_what_needs_none_and_recovers(folder: Path, tmp_path: Path) -> None:
    """An open connection goes on; new ones wait; what must open something is a typed error; all of it ends."""
    config = {"kv_role": "kv_both", "kv_port": 0, "kv_connector_extra_config": {"allowed_hosts": ["127.0.0.1"]}}
    flags = ("--num-kv-blocks", "300", "--kv-transfer-config", json.dumps(config), "--swap-space", "64MiB")
    cache = ("--prefix-cache-dir", str(tmp_path / "cache"), "--prefix-cache-write-policy", "write_through")
    with running(folder, tmp_path / "log", *flags, *cache) as server:
        expected = server.post("/v1/completions", BODY).json()["choices"][0]["text"]
        asked = server.post("/v1/completions", {**BODY, "kv_transfer_params": {"do_remote_decode": True}})
        peer_port = asked.json()["kv_transfer_params"]["remote_port"]
        url = urlsplit(server.url)
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as other, socket.socket() as late:
            with free_descriptors(pid=server.process.pid), socket.socket() as peer:
                peer.connect(("127.0.0.1", peer_port))
                late.connect((url.hostname, url.port))
                late.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                wait_for(lambda: metric(server, "kv_transfer_starved_total") > 0)
                # The open connection: plain requests, with blocks on disk, and from another engine.
                for idx in range(4):
                    answer = server.post("/v1/completions", {**BODY, "prompt": [*range(30 + idx, 80)]})
                    assert answer.status_code == 200, answer.text
                fetch = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": peer_port}
                answer = server.post(
                    "/v1/completions", {**BODY, "prompt": [7, *range(30, 80)], "kv_transfer_params": fetch}
                )
                assert answer.status_code == 200, answer.text
                answer = server.post("/v1/completions", GRAMMAR)
                assert answer.status_code == 503, answer.text
                assert answer.json()["error"]["code"] == "engine_error"
                assert server.post("/v1/completions", BODY).json()["choices"][0]["text"] == expected
            # Recovered: the connection that waited, new ones, grammars, the disk.
            late.settimeout(PATIENCE_S)
            assert late.recv(12) == b"HTTP/1.1 200"
            assert other.get("/health").status_code == 200
            answer = other.post("/v1/completions", json=GRAMMAR)
            assert answer.status_code == 200, answer.text
            assert re.match("(ab)+", answer.json()["choices"][0]["text"])
            wait_for(lambda: metric(server, "prefix_cache_disk_saved_total") > 0)
        assert server.log.read_text().count("no connection can be taken") <= 1
        assert server.stop() == 0
