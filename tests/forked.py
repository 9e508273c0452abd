"""Attempts that may crash, hang or take all memory, each in a fork of a process that has imported what it needs."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Attempt = Callable[[str], dict[str, Any]]


@contextmanager
def attempts_of(module: str) -> Iterator[Attempt]:
    """Start a module that calls `serve`, and give a function that has it attempt what a line says.

    An answer has what the attempt said, its seconds, and the most bytes that it had in memory.
    """
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    # To write where a panic came from, the library maps more than the limit leaves, and aborts.
    environ["RUST_BACKTRACE"] = "0"
    command = [sys.executable, "-m", module]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, cwd=Path(__file__).parents[1]
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines, answers = process.stdin, process.stdout

        def attempt(line: str) -> dict[str, Any]:
            lines.write(f"{line}\n")
            lines.flush()
            return dict(json.loads(answers.readline()))

        yield attempt


def serve(attempt: Callable[[str], str], memory_bytes: int, timeout_s: int) -> None:
    """Answer each line of standard input with what came of its attempt, until there are no more.

    Args:
        attempt: from a line to what it says, of at most 64 KiB; an exception is "untyped: " and its traceback.
        memory_bytes: how much an attempt may allocate besides what this process has.
    """
    # The panics of libraries and the warnings of models go nowhere.
    answers = os.fdopen(os.dup(1), "w")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    for line in sys.stdin:
        answers.write(json.dumps(_in_a_process(attempt, line.rstrip("\n"), memory_bytes, timeout_s)) + "\n")
        answers.flush()


def _in_a_process(attempt: Callable[[str], str], line: str, memory_bytes: int, timeout_s: int) -> dict[str, object]:
    """Fork, attempt, and return what came of it with the seconds and bytes that it took."""
    read, write = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        os.close(read)
        signal.alarm(timeout_s)
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = num_pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            said = attempt(line)
        except BaseException:
            said = "untyped: " + traceback.format_exc()[-1500:]
        os.write(write, said.encode("utf-8", "replace")[: 64 << 10])
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read().decode()
    _, status, usage = os.wait4(pid, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        said = "timeout" if number == signal.SIGALRM else f"ended by signal {number}"
    return {"said": said, "seconds": time.monotonic() - began, "bytes": usage.ru_maxrss * 1024}
