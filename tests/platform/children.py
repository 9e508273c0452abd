"""Programs of child processes in tests of how they end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from quire.platform.child_process import ChildProcess

HERE = "tests.platform.children"


def sleep() -> None:
    """Wait, as long as a test may take."""
    print("ready", flush=True)
    time.sleep(600)


def compute() -> None:
    """Hold the interpreter lock in compiled code."""
    print("ready", flush=True)
    sum(range(10**15))


def start(program: str) -> ChildProcess:
    """Start one of these programs, and wait until it runs."""
    child = ChildProcess(f"{HERE}:{program}", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    return child


def be_parent(program: str) -> None:
    """Start a program, print its process id, and wait to be killed."""
    child = start(program)
    print(child.pid, flush=True)
    time.sleep(600)


def be_forked_parent(program: str) -> None:
    """The same, with a process that was forked from the parent and outlives it."""
    child = start(program)
    if (forked := os.fork()) == 0:
        time.sleep(600)
    print(forked, child.pid, flush=True)
    time.sleep(600)


def be_threaded_parent(program: str) -> None:
    """The same, with a thread that ends after it has started the program."""
    children: list[ChildProcess] = []
    thread = threading.Thread(target=lambda: children.append(start(program)))
    thread.start()
    thread.join()
    print(children[0].pid, flush=True)
    time.sleep(600)


def be_hasty_parent() -> None:
    """Start a program and end before it has looked for its parent."""
    child = ChildProcess(f"{HERE}:sleep", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    os._exit(0)


def run_parent(function: str, *arguments: str, path: Path | None = None) -> subprocess.Popen[str]:
    """Run one of these parents in a process of its own."""
    root = Path(__file__).parents[2]
    first = [] if path is None else [str(path)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*first, str(root / "src"), str(root)])}
    code = f"import sys; from {HERE} import {function}; {function}(*sys.argv[1:])"
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, env=environ)
