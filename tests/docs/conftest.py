"""The server that the examples of the documents talk to."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def server_address() -> Iterator[str]:
    """A server on the bundled model, and its address."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--log-level", "warning", "--num-threads", "1"]
    command += ["--pin-limit", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address is not None
        yield address[0]
        process.send_signal(signal.SIGINT)
