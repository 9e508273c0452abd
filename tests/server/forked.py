"""Commands of Quire in processes forked from one that has imported it: imports are most of the start of a server."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

# It is started with the first process of a test run, imports what a server needs, and never computes anything, so it
# has no threads when it forks.
_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.server.preloaded"])

# Environment variable with a module that changes Quire, for faults that no request can cause.
PATCH: Final = "QUIRE_TEST_PATCH"


class ForkedProcess:
    """A command of Quire, with the part of `subprocess.Popen` that tests of servers use.

    Args:
        arguments: what comes behind `quire`.
        log: a file for standard error.
        env: environment variables of the process.

    Attributes:
        stdout: text stream of its standard output.
    """

    def __init__(self, arguments: Sequence[str], log: Path, env: dict[str, str]) -> None:
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_run, args=(list(arguments), str(log), env, theirs))
        self._process.start()
        theirs.close()
        self.stdout = os.fdopen(os.dup(ours.fileno()))
        ours.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, that of a signal being negative; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit code.

        Raises:
            TimeoutExpired: it has not ended in time.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.wait()


def _run(arguments: list[str], log: str, env: dict[str, str], stdout: Connection) -> None:
    """Be the command."""
    from quire.cli.main import main

    os.environ.clear()
    os.environ.update(env)
    if PATCH in env:
        importlib.import_module(env[PATCH])
    os.dup2(stdout.fileno(), 1)
    stdout.close()
    errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(errors, 2)
    os.close(errors)
    sys.argv = ["quire", *arguments]
    sys.exit(main(arguments))
