"""From a checkpoint on disk to weights that are ready to multiply: `python -m benchmarks.loading`.

Beside it, what reading the same files takes: into one buffer over and over, and into memory that is used for the first
time, which the system has to clear before, as it has for weights. Each in a process of its own, in another order each
time; imports are not timed. The page cache is warm, since each run reads the files whole. How long it takes to clear
huge pages depends on who had them before: in a virtual machine, what no process has used for a while comes from the
host, forty times as slowly. So each process first takes and returns as much as it will need, unless `--cold`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, make_model
from benchmarks.throughput import ROOT
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.loading.loading import load_decoder
from quire.platform.malloc import keep_freed_memory, use_huge_pages
from quire.platform.prefault import MADV_POPULATE_WRITE

MIB = 1 << 20


def files_of(model: Path) -> list[Path]:
    """Return the files with a model's weights: a GGUF file itself, or those of a folder."""
    return [model] if model.is_file() else sorted(model.glob("*.safetensors"))


def read_again(model: Path) -> None:
    """Read a model's weights piece by piece, each over the one before."""
    buffer = bytearray(64 * MIB)
    for path in files_of(model):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def new_memory(num_bytes: int) -> mmap.mmap:
    """Return memory of huge pages, as that of weights is."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def take_and_return(num_bytes: int) -> None:
    """Have a process use memory and return it to the system, which then has its pages at hand."""
    child = os.fork()
    if child == 0:
        new_memory(num_bytes).madvise(MADV_POPULATE_WRITE)
        os._exit(0)
    os.waitpid(child, 0)


def read_once(model: Path) -> None:
    """Read a model's weights into new memory, on the pages that weights get."""
    for path in files_of(model):
        view = memoryview(new_memory(path.stat().st_size))
        with path.open("rb", buffering=0) as file:
            while num_read := file.readinto(view):
                view = view[num_read:]


def loading(**options: Any) -> Callable[[Path], None]:
    """Return what loads a model with some options."""

    def load(model: Path) -> None:
        load_decoder(Checkpoint.open(str(model)), device="cpu", dtype=torch.bfloat16, **options)

    return load


JOBS: dict[str, Callable[[Path], None]] = {
    "read again": read_again,
    "read once": read_once,
    "plain": loading(weight_packing="plain"),
    "lossless": loading(weight_packing="lossless"),
    "int8": loading(quantization="int8"),
    "int4": loading(quantization="int4"),
    "stored": loading(),
}
# The jobs of a checkpoint whose weights are stored quantised, and of others.
STORED_JOBS = ("read again", "read once", "stored")
PLAIN_JOBS = tuple(job for job in JOBS if job != "stored")


def timed(job: str, model: Path, threads: int, *, is_cold: bool) -> dict[str, float]:
    """Run a job once, in this process; return its seconds and the most memory that the process has held."""
    torch.set_num_threads(threads)
    use_huge_pages()
    keep_freed_memory()
    if not is_cold:
        take_and_return(2 * sum(path.stat().st_size for path in files_of(model)))
    started = time.perf_counter()
    JOBS[job](model)
    return {"wall_s": time.perf_counter() - started, "peak_bytes": machine.peak_memory_bytes()}


def measure(
    model: Path, threads: int, runs: int, jobs: Sequence[str], *, is_cold: bool = False
) -> list[dict[str, Any]]:
    """Run jobs again and again, each in a new process; return a row of figures for each."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT / "src")}
    rows = []
    for run in range(runs):
        for job in random.Random(run).sample(jobs, len(jobs)):
            command = [sys.executable, "-m", "benchmarks.loading", "--model", str(model), "--threads", str(threads)]
            command += ["--worker", job, *(["--cold"] if is_cold else [])]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
            rows.append({"job": job, "run": run, **json.loads(done.stdout)})
    return rows


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder, or a GGUF file")
    parser.add_argument("--stored", action="store_true", help="the model is quantised: load it as it is stored")
    parser.add_argument("--name", default="loading", help="name of the file of results")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--cold", action="store_true", help="leave it to chance who had the memory before")
    parser.add_argument("--worker", choices=JOBS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        print(json.dumps(timed(options.worker, options.model, options.threads, is_cold=options.cold)))
        return
    model = options.model or make_model.ensure()
    read_again(model)
    jobs = STORED_JOBS if options.stored else PLAIN_JOBS
    rows = measure(model, options.threads, options.runs, jobs, is_cold=options.cold)
    median_s = {job: statistics.median(row["wall_s"] for row in rows if row["job"] == job) for job in jobs}
    for job in jobs:
        of_job = [row for row in rows if row["job"] == job]
        walls = [row["wall_s"] for row in of_job]
        print(
            f"{job:11}{median_s[job]:6.2f} s ({min(walls):.2f} to {max(walls):.2f}), "
            f"{median_s[job] / median_s['read again']:.2f} times reading again and again, "
            f"{median_s[job] / median_s['read once']:.2f} times reading once, "
            f"peak {max(row['peak_bytes'] for row in of_job) / 1e6:,.0f} MB"
        )
    figures = {"model": model.name, "threads": options.threads, "median_s": median_s, "runs": rows}
    print(machine.save(options.name, figures))


if __name__ == "__main__":
    main()
