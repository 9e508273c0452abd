"""The torch line, seen from a fresh interpreter: what an import really brings in."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "transformers", "tokenizers", "starlette", "rich")


def heavy_modules_after(statement: str) -> list[str]:
    """Return which heavy modules a new interpreter holds after one statement."""
    code = f"{statement}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    "module",
    [
        "quire",
        "quire.capacity.planner",
        "quire.config",
        "quire.decoding",
        "quire.errors",
        "quire.memory",
        "quire.memory.manager",
        "quire.scheduling.plan",
        "quire.scheduling.scheduler",
        "quire.sequences.params",
        "quire.simulation",
    ],
)
def test_the_control_plane_brings_in_the_standard_library_only(module: str) -> None:
    assert heavy_modules_after(f"import {module}") == []


def test_the_probe_sees_a_heavy_module() -> None:
    assert heavy_modules_after("import numpy") == ["numpy"]


def test_a_public_name_is_loaded_when_it_is_asked_for() -> None:
    assert "torch" in heavy_modules_after("from quire import LLM")


def test_sampling_params_need_no_torch() -> None:
    assert heavy_modules_after("from quire import SamplingParams") == []
