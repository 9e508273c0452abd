"""`quire serve --replicas`: servers on this machine behind one address, and what becomes of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from quire.cli.main import main
from quire.fleet.local_fleet import without_address
from tests.server import checkpoint
from tests.server.process import PATIENCE_S


def test_the_servers_get_all_arguments_but_those_of_the_address() -> None:
    given = "MODEL --port 80 --replicas=2 --num-kv-blocks 300 --uds /tmp/a --watch --tenant-header x --host=0.0.0.0"
    assert without_address(given.split()) == ["MODEL", "--num-kv-blocks", "300", "--tenant-header", "x"]


@pytest.mark.parametrize("count", ["0", "65", "-1"])
def test_a_number_of_servers_that_is_not_allowed_is_refused(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--replicas", count, "--port", "0"]) == 2
    assert f"replicas must be from 1 to 64, got {count}" in capsys.readouterr().err


@pytest.mark.slow
def test_several_servers_answer_at_one_address_and_end_with_it(tmp_path: Path) -> None:
    folder = checkpoint.save(tmp_path / "tiny")
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "quire", "serve", str(folder), "--port", "0", "--replicas", "2"]
    command += ["--num-kv-blocks", "300", "--served-model-name", "tiny", "--log-interval", "0"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=env, text=True)
    with process:
        try:
            assert process.stdout is not None
            match = re.search(r"Quire routes to 2 servers at (http://\S+)", process.stdout.readline())
            assert match, (tmp_path / "log").read_text()
            with httpx.Client(base_url=match[1], timeout=PATIENCE_S) as http:
                body = {"model": "tiny", "temperature": 0, "max_tokens": 4, "ignore_eos": True}
                places = set()
                for number in range(4):
                    answer = http.post("/v1/completions", json={**body, "prompt": f"{number} " * 40})
                    assert answer.status_code == 200
                    places.add(answer.headers["x-quire-replica"])
                assert len(places) == 2
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
            for place in places:
                with pytest.raises(httpx.ConnectError):
                    httpx.get(f"{place}/health")
        finally:
            process.kill()
