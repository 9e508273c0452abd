"""Two ranks of one thread beside one process of two threads: `python -m benchmarks.tensor_parallel`.

Processes of both take turns. Each serves W2 and W3 (`quire.measurement.bench.workloads`), and says what memory its
weights take: the private memory of all its processes after loading, less that of the same with the bundled model. Then
the time of control with 256 sequences of the bundled model, which is what a step takes on rank 0 outside of the
scheduler and the data plane because of the ranks, and the time of a sum of some rows between two processes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.make_model import ensure
from quire import LLM, SamplingParams
from quire.config import ParallelConfig
from quire.distributed.launch import join_ranks, start_ranks
from quire.measurement.bench.workloads import BenchRequest, workload

MARKS = {"of_one_process": 0.92, "control_ms": 0.3, "resident": 1.1}
WORKLOADS = ("W2", "W3")
CONTENDERS = {"one process": (1, 2), "two ranks": (2, 1)}  # ranks, and threads of each
SUM_ROWS, SUM_WIDTH, NUM_SUMS = (1, 4, 16, 256), 1024, 2000
NUM_SEQS, NUM_STEPS = 256, 100


def serve(llm: LLM, requests: list[BenchRequest]) -> float:
    """Return the seconds that requests take which come at once."""
    engine, started = llm.engine, time.perf_counter()
    for idx, request in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=request.num_new, ignore_eos=True)
        engine.add_request(str(idx), {"prompt_token_ids": request.prompt}, params)
    while engine.has_unfinished:
        engine.step()
    return time.perf_counter() - started


def private_bytes(llm: LLM) -> int:
    """Return the private memory of the processes of an engine."""
    processes = [] if llm.engine.ranks is None else llm.engine.ranks.process_ids
    total = 0
    for process in (os.getpid(), *processes):
        text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
        total += sum(int(kib) << 10 for kib in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE))
    return total


def serve_workloads(llm: LLM, runs: int) -> dict[str, list[float]]:
    """Serve each workload some times after a warm-up, and return the seconds."""
    ids = range(256, min(128000, llm.resolved.vocab_size))
    found: dict[str, list[float]] = {}
    for name in WORKLOADS:
        serve(llm, workload(name, 0, ids).requests)
        found[name] = [serve(llm, workload(name, run, ids).requests) for run in range(1, runs + 1)]
    return found


def run_contender(model: str, size: int, num_threads: int, runs: int) -> dict[str, Any]:
    """Load a model, serve each workload some times after a warm-up, and return the seconds and the memory."""
    options: dict[str, Any] = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "max_num_seqs": 16}
    # Without runs, memory is measured, of which the KV cache is to be no part.
    num_blocks, length = (1200, 2048) if runs else (4, 64)
    options |= {"num_threads": num_threads, "num_kv_blocks": num_blocks, "max_model_len": length}
    with LLM(model, tensor_parallel_size=size, **options) as llm:
        return serve_workloads(llm, runs) if runs else {"private_bytes": private_bytes(llm)}


def in_process(arguments: list[str], module: str = "benchmarks.tensor_parallel") -> Any:
    """Run a module in a process of its own and return what it prints last, a line of JSON."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_control() -> dict[str, float]:
    """Return the milliseconds of a step of 256 sequences on rank 0 that are there because of the ranks: medians."""
    options: dict[str, Any] = {"num_threads": 1, "max_num_seqs": NUM_SEQS, "max_num_batched_tokens": 4096}
    with LLM("bundled", tensor_parallel_size=2, num_kv_blocks=4000, max_model_len=512, **options) as llm:
        logged: Any = llm.engine.scheduler
        inner, clock = logged._inner, time.perf_counter
        spent = {"outer": 0.0, "inner": 0.0}

        def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                started = clock()
                try:
                    return call(*arguments)
                finally:
                    spent[part] += clock() - started

            return run

        for name in ("plan", "update_from_results"):
            vars(logged)[name] = timed("outer", getattr(logged, name))
            setattr(inner, name, timed("inner", getattr(inner, name)))
        params = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS + 60, ignore_eos=True, detokenize=False)
        for idx in range(NUM_SEQS):
            llm.engine.add_request(str(idx), {"prompt_token_ids": [300 + idx] * 8}, params)
        for _ in range(30):
            llm.engine.step()
        times, steps = [], []
        for _ in range(NUM_STEPS):
            spent.update(outer=0.0, inner=0.0)
            started = clock()
            llm.engine.step()
            steps.append(clock() - started)
            times.append(spent["outer"] - spent["inner"])
        for idx in range(NUM_SEQS):
            llm.engine.abort_request(str(idx))
    ordered = sorted(times)
    return {
        "control_ms": 1e3 * statistics.median(times),
        "control_p90_ms": 1e3 * ordered[9 * len(ordered) // 10],
        "step_ms": 1e3 * statistics.median(steps),
    }


def rows(num_rows: int) -> torch.Tensor:
    return torch.ones(num_rows, SUM_WIDTH, dtype=torch.bfloat16)


def sum_rank(rank: int, connection: int, memory: int) -> None:
    """Take part in the sums of rank 0."""
    ranks, _ = join_ranks(rank, connection, memory, lambda _, __: None)
    for num_rows in SUM_ROWS:
        x = rows(num_rows)
        for _ in range(NUM_SUMS):
            ranks.group.all_reduce(x)
    ranks.close()


@contextmanager
def summing(backend: str) -> Iterator[Any]:
    config = ParallelConfig(tensor_parallel_size=2, all_reduce_backend=backend)
    ranks = start_ranks(config, {}, "benchmarks.tensor_parallel:sum_rank", lambda _: None)
    try:
        yield ranks.group
        ranks.expect_end()
    finally:
        ranks.close()


def measure_sums(backend: str) -> dict[str, float]:
    """Return the microseconds of a sum of some rows between two processes: medians."""
    found = {}
    with summing(backend) as group:
        for num_rows in SUM_ROWS:
            x, times = rows(num_rows), []
            for _ in range(NUM_SUMS):
                started = time.perf_counter()
                group.all_reduce(x)
                times.append(time.perf_counter() - started)
            found[f"{num_rows} rows"] = 1e6 * statistics.median(times)
    return found


def compare(model: str, runs: int, rounds: int) -> dict[str, Any]:
    """Return the figures of both contenders, which take turns."""
    found: dict[str, list[Any]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, (size, num_threads) in CONTENDERS.items():
            found[name].append(in_process(["--contender", model, str(size), str(num_threads), str(runs)]))
    shown: dict[str, Any] = {}
    for name, results in found.items():
        for each in WORKLOADS:
            times = chain.from_iterable(result[each] for result in results)
            shown.setdefault(name, {})[each] = statistics.median(times)
        sizes = [in_process(["--contender", each, *map(str, CONTENDERS[name]), "0"]) for each in (model, "bundled")]
        shown[name]["weights_mib"] = (sizes[0]["private_bytes"] - sizes[1]["private_bytes"]) / 2**20
    one, two = shown.values()
    shown["throughput of two ranks / one process"] = {each: one[each] / two[each] for each in WORKLOADS}
    shown["weights of two ranks / one process"] = two["weights_mib"] / one["weights_mib"]
    return shown


def main() -> None:
    """Run the comparison, or one contender of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="checkpoint folder (default: Qwen3-0.6B's shape, random weights)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each workload in a process")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each contender")
    parser.add_argument("--contender", nargs=4, metavar="X", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("control", "sums"), help="measure this part alone")
    options = parser.parse_args()
    if options.contender:
        model, *numbers = options.contender
        print(json.dumps(run_contender(model, *map(int, numbers))))
        return
    report: dict[str, Any] = {"marks": MARKS, "machine": machine.facts()}
    if options.part != "sums":
        report["control of 256 sequences"] = measure_control()
    if options.part != "control":
        report["microseconds of a sum"] = {each: measure_sums(each) for each in ("shared_memory", "gloo")}
    if options.part is None:
        report |= compare(options.model or str(ensure("qwen3-0.6b", None)), options.runs, options.rounds)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
