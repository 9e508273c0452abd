"""Child processes end with the process that started them, however it ends, and not with the thread that did."""

from __future__ import annotations

import ast
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.platform import child_process
from quire.platform.child_process import ChildProcess
from tests.platform.children import HERE, run_parent, start

PATIENCE_S = 60
SOURCES = Path(child_process.__file__).parents[1]


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that has ended, and that nobody has waited for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_ended(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} outlives its parent"
        time.sleep(0.01)


@pytest.mark.parametrize("program", ["sleep", "compute"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_parent(program: str, number: int) -> None:
    with run_parent("be_parent", program) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.send_signal(number)
    wait_until_ended(pid)


def test_it_ends_with_its_parent_where_pipes_send_no_signals(tmp_path: Path) -> None:
    (tmp_path / "fcntl.py").write_text("raise ImportError\n")
    with run_parent("be_parent", "sleep", path=tmp_path) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_until_ended(pid)


def test_it_ends_though_a_fork_of_its_parent_lives() -> None:
    with run_parent("be_forked_parent", "sleep") as parent:
        assert parent.stdout is not None
        forked, pid = map(int, parent.stdout.readline().split())
        parent.kill()
        parent.wait(PATIENCE_S)
        try:
            wait_until_ended(pid)
            assert is_running(forked)
        finally:
            os.kill(forked, signal.SIGKILL)


def test_it_outlives_the_thread_that_started_it() -> None:
    with run_parent("be_threaded_parent", "sleep") as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.1)
        assert is_running(pid)
        parent.kill()
    wait_until_ended(pid)


def test_it_ends_though_its_parent_has_ended_first() -> None:
    with run_parent("be_hasty_parent") as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
    wait_until_ended(pid)


def test_it_ends_when_nobody_refers_to_it() -> None:
    child = start("sleep")
    pid = child.pid
    assert child.stdout is not None
    child.stdout.close()
    with pytest.warns(ResourceWarning, match="still running"):
        del child
    wait_until_ended(pid)


def test_its_descriptor_is_closed_when_it_has_ended() -> None:
    gc.collect()
    before = os.listdir("/proc/self/fd")
    for end in ("wait", "poll"):
        child = ChildProcess(f"{HERE}:sleep", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        child.kill()
        while getattr(child, end)() is None:
            time.sleep(0.01)
        assert os.listdir("/proc/self/fd") == before


def test_one_that_does_not_start_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(OSError, match="No such file"):
        ChildProcess(f"{HERE}:sleep")
    assert os.listdir("/proc/self/fd") == before


OWN = {
    "subprocess": ("Popen", "run", "call", "check_call", "check_output", "getoutput", "getstatusoutput"),
    "os": ("fork", "forkpty", "system", "popen", "posix_spawn", "posix_spawnp", "spawnv", "spawnve", "spawnl"),
    "asyncio": ("create_subprocess_exec", "create_subprocess_shell"),
}


def starts_a_process(node: ast.AST) -> bool:
    """Return whether code starts a process by other means than `ChildProcess`."""
    if isinstance(node, ast.Import):
        return any(alias.name.startswith("multiprocessing") for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        module = str(node.module)
        return module.startswith("multiprocessing") or any(alias.name in OWN.get(module, ()) for alias in node.names)
    called = node.func if isinstance(node, ast.Call) else None
    if not isinstance(called, ast.Attribute) or not isinstance(called.value, ast.Name):
        return False
    return called.attr in OWN.get(called.value.id, ())


def test_nothing_else_starts_processes() -> None:
    found = set()
    for path in SOURCES.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        # Few files have one of these words, and parsing all of them takes seconds.
        if any(word in text for word in ("multiprocessing", "subprocess", "fork", "spawn", "popen", "os.system")):
            found |= {path.relative_to(SOURCES) for node in ast.walk(ast.parse(text)) if starts_a_process(node)}
    assert found == set()
