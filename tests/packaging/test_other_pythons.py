"""The control plane and the command line run on every other Python of the classifiers that is found here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Every module that needs the standard library only, and the example of docs/memory/concepts.md. Warnings are errors.
CONTROL_PLANE = """
import pkgutil, re, sys
from pathlib import Path
import quire
for package in ("memory", "scheduling", "sequences", "config", "measurement.simulation", "platform.bounded", "errors"):
    module = __import__(f"quire.{package}", fromlist=["_"])
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), f"quire.{package}."):
        __import__(found.name)
page = Path("docs/memory/concepts.md").read_text(encoding="utf-8")
(example,) = re.findall(r"^```python\\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
exec(compile(example, "concepts.md", "exec"), {})
assert "torch" not in sys.modules
"""


def declared() -> list[str]:
    """Return the minor versions that the classifiers declare."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        classifiers = tomllib.load(file)["project"]["classifiers"]
    return re.findall(r"Programming Language :: Python :: (3\.\d+)$", "\n".join(classifiers), re.MULTILINE)


def interpreter(version: str) -> str | None:
    """Return an interpreter of a version, on the path or among those of pyenv."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python{version}"), *map(str, versions.glob(f"{version}.*/bin/python"))]
    for found in filter(None, candidates):
        done = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.startswith(f"Python {version}."):
            return found
    return None


def test_the_oldest_declared_python_is_the_one_required() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["requires-python"] == f">={declared()[0]}"
    assert declared() == ["3.11", "3.12", "3.13", "3.14"]


@pytest.mark.parametrize("version", declared()[1:])
def test_the_control_plane_and_the_command_line_run(version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    # In isolation from this interpreter's packages: what is imported is the standard library and Quire.
    environment = {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, "-W", "error", *arguments], capture_output=True, text=True, check=False, cwd=ROOT, env=environment
        )

    done = run("-c", CONTROL_PLANE)
    assert done.returncode == 0, done.stderr
    done = run("-m", "quire", "serve", "--help")
    assert done.returncode == 0, done.stderr
    assert "(default: 8GiB)" in " ".join(done.stdout.split())
    done = run("-m", "quire", "serve", "--port", "99999")
    assert (done.returncode, done.stderr) == (2, "quire: error: port must be from 0 to 65535, got 99999\n")
