"""The benchmark of loading runs in a process of its own, and its output is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import make_model
from benchmarks.loading import JOBS, measure
from tests.ops.backends import LIBRARIES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = make_model.SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 1, "vocab_size": 512}
    make_model.write(config, folder)
    return folder


PACKS = bool(set(LIBRARIES) - {"portable"})
NEEDS = {"lossless": [pytest.mark.skipif(not PACKS, reason="the kernels of this CPU do not pack so")]}


@pytest.mark.parametrize("job", [pytest.param(job, marks=NEEDS.get(job, [])) for job in JOBS])
def test_a_job_finds_what_it_needs(model: Path, job: str) -> None:
    JOBS[job](model)


@pytest.mark.slow
def test_a_job_runs_in_a_process_of_its_own(model: Path) -> None:
    (row,) = measure(model, threads=1, runs=1, jobs=("int4",))
    assert row["job"] == "int4"
    assert row["wall_s"] > 0
    assert row["peak_bytes"] > sum(path.stat().st_size for path in model.glob("*.safetensors"))
