"""All processes that a command has started, with theirs: they inherit a variable of its environment."""

from __future__ import annotations

import os
import signal
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final

VARIABLE: Final = "QUIRE_TEST_TREE"


class ProcessTree:
    """The processes of one command.

    Attributes:
        environ: variables to add to the environment of the command.
    """

    def __init__(self) -> None:
        name = uuid.uuid4().hex
        self.environ = {VARIABLE: name}
        self._mark = f"{VARIABLE}={name}".encode()

    def pids(self) -> list[int]:
        """Return the processes that run, in no order."""
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if self._has(path)]

    def wait_until_ended(self, timeout_s: float) -> list[str]:
        """Wait until no process runs; return the commands of those that do after the time limit."""
        deadline_s = time.monotonic() + timeout_s
        while (pids := self.pids()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return [_command(pid) for pid in pids]

    def kill(self) -> None:
        """Kill all processes."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _has(self, path: Path) -> bool:
        try:
            # A process that nobody has waited for has ended, and its environment is empty.
            return self._mark in (path / "environ").read_bytes().split(b"\0")
        except OSError:
            return False


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:200].decode("utf-8", "replace")
    return str(pid)
