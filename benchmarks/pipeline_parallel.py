"""Two stages of one thread beside one process of two threads: `python -m benchmarks.pipeline_parallel`.

Processes of the contenders take turns. Each serves W2 and W3 (`quire.measurement.bench.workloads`); stages do so with
one microbatch in flight, where one of them waits for the other, and with two. Then the time in which the hidden states
of some rows go from one process to another and an answer of a row comes back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import chain
from typing import Any

import torch

from benchmarks import machine
from benchmarks.make_model import ensure
from benchmarks.tensor_parallel import WORKLOADS, in_process, serve_workloads
from quire import LLM
from quire.config import ParallelConfig
from quire.distributed.launch import join_ranks, start_ranks
from quire.distributed.pipeline import PipelineGroup

# Stages, threads of each, and microbatches in flight.
CONTENDERS = {
    "one process": (1, 2, 1),
    "two stages, one microbatch": (2, 1, 1),
    "two stages, two microbatches": (2, 1, 2),
}
LINK_ROWS, LINK_WIDTH, NUM_LINKS = (1, 16, 256), 1024, 2000


def run_contender(model: str, size: int, num_threads: int, microbatches: int, runs: int) -> dict[str, list[float]]:
    """Load a model, serve each workload some times after a warm-up, and return the seconds."""
    options: dict[str, Any] = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "max_num_seqs": 16}
    options |= {"num_threads": num_threads, "num_kv_blocks": 1200, "max_model_len": 2048}
    with LLM(model, pipeline_parallel_size=size, pipeline_microbatches=microbatches, **options) as llm:
        return serve_workloads(llm, runs)


def rows(num_rows: int) -> torch.Tensor:
    return torch.ones(1, num_rows, LINK_WIDTH, dtype=torch.bfloat16)


def send_rows(rank: int, connection: int, memory: int) -> None:
    """Send rows to rank 0, one message after each command of it."""
    ranks, _ = join_ranks(rank, connection, memory, lambda _, __: None)
    assert isinstance(ranks.group, PipelineGroup)
    for num_rows in LINK_ROWS:
        x = rows(num_rows)
        for _ in range(NUM_LINKS):
            ranks.group.receive_commands()
            ranks.group.send(x)
    ranks.close()


def measure_links(backend: str) -> dict[str, float]:
    """Return the microseconds from a command to the rows that another process answers it with: medians."""
    config = ParallelConfig(pipeline_parallel_size=2, all_reduce_backend=backend)
    ranks = start_ranks(config, {}, "benchmarks.pipeline_parallel:send_rows", lambda _: None)
    group, found = ranks.group, {}
    assert isinstance(group, PipelineGroup)
    try:
        for num_rows in LINK_ROWS:
            times = []
            for _ in range(NUM_LINKS):
                started = time.perf_counter()
                group.send_commands(b"go")
                group.receive((1, num_rows, LINK_WIDTH), torch.bfloat16)
                times.append(time.perf_counter() - started)
            found[f"{num_rows} rows"] = 1e6 * statistics.median(times)
        ranks.expect_end()
    finally:
        ranks.close()
    return found


def compare(model: str, runs: int, rounds: int) -> dict[str, Any]:
    """Return the median seconds of all contenders, which take turns, and their throughput beside the first one's."""
    found: dict[str, list[Any]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, numbers in CONTENDERS.items():
            found[name].append(
                in_process(["--contender", model, *map(str, numbers), str(runs)], "benchmarks.pipeline_parallel")
            )
    shown: dict[str, Any] = {
        name: {each: statistics.median(chain.from_iterable(result[each] for result in results)) for each in WORKLOADS}
        for name, results in found.items()
    }
    one, *others = CONTENDERS
    ratios = {name: {each: shown[one][each] / shown[name][each] for each in WORKLOADS} for name in others}
    return {"seconds": shown, f"throughput / {one}": ratios}


def main() -> None:
    """Run the comparison, or one contender of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="checkpoint folder (default: Qwen3-0.6B's shape, random weights)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each workload in a process")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each contender")
    parser.add_argument("--contender", nargs=5, metavar="X", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("links",), help="measure this part alone")
    options = parser.parse_args()
    if options.contender:
        model, *numbers = options.contender
        print(json.dumps(run_contender(model, *map(int, numbers))))
        return
    report: dict[str, Any] = {"machine": machine.facts()}
    report["microseconds of a link"] = {each: measure_links(each) for each in ("shared_memory", "gloo")}
    if options.part is None:
        report |= compare(options.model or str(ensure("qwen3-0.6b", None)), options.runs, options.rounds)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
