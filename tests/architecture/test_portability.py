"""Quire imports, and runs a model, where the modules and calls of POSIX or Linux do not exist."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "src" / "quire"
# Modules of the standard library that Windows does not have.
POSIX_MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty")
# Runs at the start of every Python process, of those that Quire starts too.
SITECUSTOMIZE = f"""
import os, select, signal, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {POSIX_MODULES!r}:
            raise ImportError(f"there is no module {{name}} here")

sys.meta_path.insert(0, Absent())
for module, name in ((select, "poll"), (signal, "setitimer"), (signal, "SIGALRM"), (signal, "SIGHUP"),
                     (os, "set_blocking"), (os, "O_CLOEXEC"), (os, "O_NONBLOCK"), (os, "sched_getaffinity")):
    delattr(module, name)

def refuse(event, args):
    if event == "open" and isinstance(args[0], str) and args[0].startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "there is no such file here", args[0])

sys.addaudithook(refuse)
"""
RUN = """
import pkgutil
import quire
for module in pkgutil.walk_packages(quire.__path__, "quire."):
    if not module.name.endswith("__main__"):
        try:
            __import__(module.name)
        except ModuleNotFoundError as error:
            if error.name not in ("ray", "triton"):  # extras of Quire that the tests do without
                raise
from quire import LLM, SamplingParams
with LLM("bundled", kv_cache_memory_bytes="16MiB") as llm:
    (output,) = llm.chat([{"role": "user", "content": "Who are you?"}], SamplingParams(temperature=0, max_tokens=24))
    print(output.outputs[0].text)
from quire.server.http.listener import read_max_connections
print(read_max_connections(None))
"""


def imports_at_the_top(path: Path) -> Iterator[str]:
    """Yield the modules that importing a module imports: those outside of functions and of `if` and `try` blocks."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def test_no_module_imports_a_posix_module_at_its_top() -> None:
    found = {
        (str(path.relative_to(SOURCES)), name)
        for path in SOURCES.rglob("*.py")
        for name in imports_at_the_top(path)
        if name in POSIX_MODULES
    }
    assert found == set()


@pytest.mark.slow
def test_everything_imports_and_a_model_runs_without_posix(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(SOURCES.parent)])
    command = [sys.executable, "-c", RUN]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    text, limit = done.stdout.splitlines()
    assert "Quire" in text
    assert limit == "8192"
