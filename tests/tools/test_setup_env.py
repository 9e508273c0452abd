"""Setting up the environment: the parts that decide, and what a user is told when it cannot be done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools import setup_env


def test_the_requirement_on_torch_is_the_one_of_pyproject(tmp_path: Path) -> None:
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text('[project]\ndependencies = ["rich", "torch>=2.11,<2.14"]\n', encoding="utf-8")
    assert setup_env.torch_requirement(pyproject) == "torch>=2.11,<2.14"
    assert setup_env.torch_requirement(setup_env.ROOT / "pyproject.toml").startswith("torch>=")


def test_a_torch_in_range_is_kept_and_one_out_of_range_is_not() -> None:
    python = Path(sys.executable)
    assert setup_env.has_torch(python, setup_env.torch_requirement(setup_env.ROOT / "pyproject.toml"))
    assert not setup_env.has_torch(python, "torch<1.0")


def test_an_environment_without_torch_is_seen_as_such(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    assert not setup_env.has_torch(tmp_path / "venv" / "bin" / "python", "torch>=2")


def test_an_interpreter_that_cannot_make_environments_is_named(tmp_path: Path) -> None:
    script = setup_env.ROOT / "tools" / "setup_env.py"
    in_the_way = tmp_path / "a file"
    in_the_way.write_text("", encoding="utf-8")
    command = [sys.executable, str(script), "--venv", str(in_the_way / "venv")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cannot create a virtual environment" in done.stderr
    assert "PYTHON=" in done.stderr
