"""A server whose model is shared by ranks: answers, and what clients are told when a rank is killed."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.in_threads import native_library
from tests.server.process import PATIENCE_S, running
from tests.server.test_errors import check_form
from tests.server.test_lifecycle import FLAGS, LONG, begun


@pytest.mark.slow
def test_clients_get_a_typed_error_when_a_rank_is_killed(folder: Path, tmp_path: Path) -> None:
    native_library()
    body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with running(folder, tmp_path / "one", *FLAGS, "--dtype", "float32") as server:
        expected = server.post("/v1/completions", body).json()["choices"]
    with running(folder, tmp_path / "log", *FLAGS, "--dtype", "float32", "-tp", "2") as server:
        assert server.post("/v1/completions", body).json()["choices"] == expected
        listed = subprocess.run(
            ["ps", "-ww", "--ppid", str(server.process.pid), "-o", "pid=,args="],
            capture_output=True,
            text=True,
            check=True,
        )
        (rank,) = (int(line.split()[0]) for line in listed.stdout.splitlines() if "rank_process" in line)
        with server.http.stream("POST", "/v1/completions", json=LONG) as response:
            _, lines = begun(response)
            os.kill(rank, signal.SIGKILL)
            *_, error, done = [line for line in lines if line.startswith("data: ")]
        told = check_form(error.removeprefix("data: "), 503)
        assert told["code"] == "engine_error"
        assert f"rank 1 (process {rank}) was ended by SIGKILL" in told["message"]
        assert done == "data: [DONE]"
        assert server.process.wait(PATIENCE_S) == 1
        assert f"rank 1 (process {rank}) was ended by SIGKILL" in server.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_stopped_ends_its_ranks(number: signal.Signals, folder: Path, tmp_path: Path) -> None:
    native_library()
    with running(folder, tmp_path / "log", *FLAGS, "-tp", "2") as server:
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        assert server.stop(number) == 0
    log = server.log.read_text()
    assert "rank 1 (process" not in log, "a rank that was told to end has not failed"
    assert "Traceback" not in log
