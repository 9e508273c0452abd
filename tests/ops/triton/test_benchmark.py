"""`python -m benchmarks.gpu` runs to its end on tiny shapes; without a GPU it says so and exits with 2."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

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
def test_a_part_that_fails_is_a_figure_and_the_others_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from benchmarks.gpu import __main__, speed, states

    def fail(*_: Any) -> None:
        raise RuntimeError("a kernel does not compile")

    monkeypatch.setattr(speed, "measure_attention", fail)
    monkeypatch.setattr(states, "measure_states", lambda bench, _: bench.add("states of a layer", us=1.0))
    file = tmp_path / "gpu.json"
    options = Namespace(limit_s=60.0, parts=("attention", "states"), json=file, despite_errors=False)
    assert __main__.run(torch.device("cpu"), options) == 1
    figures = json.loads(file.read_text())["figures"]
    assert figures["attention"] == {"failed": "RuntimeError: a kernel does not compile"}
    assert figures["states of a layer"] == {"us": 1.0}


@pytest.mark.slow
def test_no_cache_of_a_launched_step_lies_beside_that_of_the_captured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 80 GB has no room for the weights of Llama-3.1-8B and two caches of 256 sequences."""
    pytest.importorskip("triton")
    from benchmarks.gpu import speed
    from benchmarks.gpu.memory import make_memory
    from benchmarks.gpu.shapes import REHEARSED
    from benchmarks.gpu.timing import Bench

    made, num_left = list[weakref.ref[torch.Tensor]](), list[int]()

    def make_seen(*args: Any) -> Any:
        memory = make_memory(*args)
        made.append(weakref.ref(memory.data))
        return memory

    def capture(*_: Any) -> None:
        num_left.append(sum(each() is not None for each in made))

    monkeypatch.setattr(speed, "make_memory", make_seen)
    monkeypatch.setattr(speed, "measure_captured", capture)
    for name in ("make_decoder", "run_step", "measure_pieces", "measure_drafts"):
        monkeypatch.setattr(speed, name, lambda *_: None)
    speed.measure_model(Bench(torch.device("cpu"), 600.0), None, REHEARSED)  # type: ignore[arg-type]
    assert made
    assert num_left == [0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["captured_plans", "host_steps", "host_serving", "step_plans"])
def test_benchmarks_of_the_host_need_no_gpu(name: str) -> None:
    pytest.importorskip("triton")
    options = {"captured_plans": ("--steps", "2"), "host_steps": ("--steps", "2", "--sequences", "4")}
    command = [sys.executable, "-m", f"benchmarks.{name}", *options.get(name, ("--runs", "1"))]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stderr
