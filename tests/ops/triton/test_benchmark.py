"""`python -m benchmarks.gpu` runs to its end on tiny shapes; without a GPU it says so and exits with 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.slow
def test_predictions_need_no_gpu() -> None:
    found = run("--predict")
    assert found.returncode == 0, found.stderr
    assert "| Llama-3.1-8B, decode, 1 x 1,024 | 8.28 | 5.05 | 3.52 |" in found.stdout


ALONE = """
import importlib, pkgutil, sys

OTHERS = {"gguf", "h11", "huggingface_hub", "jinja2", "llguidance", "lmdb", "msgspec", "prometheus_client", "rich"}
OTHERS |= {"safetensors", "starlette", "tokenizers", "transformers", "uvicorn", "zmq"}

class Refuser:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OTHERS:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuser())
import benchmarks.gpu
for module in pkgutil.iter_modules(benchmarks.gpu.__path__):
    importlib.import_module(f"benchmarks.gpu.{module.name}")
"""


@pytest.mark.slow
def test_all_but_the_engine_needs_torch_and_triton_alone() -> None:
    pytest.importorskip("triton")
    found = subprocess.run([sys.executable, "-c", ALONE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_without_a_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    found = run()
    assert found.returncode == 2
    assert "benchmarks.gpu: " in found.stderr


@pytest.mark.slow
def test_rehearsal(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")
    found = run("--rehearse", "--json", str(tmp_path / "gpu.json"))
    assert found.returncode == 0, found.stdout + found.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["is_right"]
    assert report["facts"]["is_rehearsal"]
    names = {
        "decode attention, 2 x 40",
        "Mamba 2, 1 x 40 rows, in chunks",
        "delta rule, 1 x 40 rows, in chunks",
        "nano-vllm's benchmark",
    }
    assert names <= report["figures"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["captured_plans", "host_steps", "host_serving", "step_plans"])
def test_benchmarks_of_the_host_need_no_gpu(name: str) -> None:
    pytest.importorskip("triton")
    options = {"captured_plans": ("--steps", "2"), "host_steps": ("--steps", "2", "--sequences", "4")}
    command = [sys.executable, "-m", f"benchmarks.{name}", *options.get(name, ("--runs", "1"))]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stderr
