"""Requests of different tenants take turns."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.process import ServerProcess, running

HEADER = "X-Tenant"
MANY = {"prompt": [[5, idx + 6] for idx in range(96)], "max_tokens": 48, "ignore_eos": True}
ONE = {"prompt": [5, 6], "max_tokens": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def busy_server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that runs four sequences at a time, and gets the tenant of each request in a header."""
    flags = ("--num-kv-blocks", "300", "--max-num-seqs", "4", "--tenant-header", HEADER, "--operator-key", "operator")
    with running(folder, tmp_path_factory.mktemp("logs") / "busy.log", *flags) as process:
        process.http.headers["authorization"] = "Bearer operator"
        yield process


def ask(server: ServerProcess, body: dict[str, Any], tenant: str) -> httpx.Response:
    return server.http.post("/v1/completions", json=body, headers={HEADER: tenant})


def test_a_small_request_takes_turns_with_another_tenants_prompts(busy_server: ServerProcess) -> None:
    with ThreadPoolExecutor() as threads:
        large: Future[httpx.Response] = threads.submit(ask, busy_server, MANY, "many")
        busy_server.wait_until(lambda status: len(status["requests"]) == 1 and status["engine"]["num_running"] == 4)
        assert ask(busy_server, ONE, "one").status_code == 200
        assert not large.done(), "it waited for all of the others"
        assert large.result().status_code == 200
