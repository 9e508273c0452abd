"""Throughput beside transformers, in the same minutes: `python -m benchmarks.throughput`.

A machine's memory bandwidth moves while one looks at it, so the engines take turns run by run, each run stands between
two bandwidth probes, and what counts is the ratio of medians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine, make_model
from benchmarks.engines import ANSWER, ENGINES
from benchmarks.workloads import NAMES

ROOT = Path(__file__).resolve().parent.parent
Figures = dict[str, Any]


class Mark(NamedTuple):
    """What a figure has to reach: the time of `slow` divided by the time of `fast` (engine, workload)."""

    slow: tuple[str, str]
    fast: tuple[str, str]
    at_least: float


MARKS = (
    Mark(("generate", "W1"), ("quire", "W1"), 1.8),
    Mark(("cb", "W1"), ("quire", "W1"), 1.8),
    Mark(("generate", "W3"), ("quire", "W3"), 2.4),
    Mark(("cb", "W3"), ("quire", "W3"), 3.5),
    Mark(("quire", "W5-off"), ("quire", "W5-warm"), 4.0),
)


class Worker:
    """One engine in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.ready_s = float(self._answer()["ready_s"])

    def run(self, name: str, run: int) -> Figures:
        """Serve one run of a workload and return its figures."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name} {run}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Figures:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                answer: Figures = json.loads(line[len(ANSWER) :])
                return answer
        raise RuntimeError(f"the engine's process ended with status {self._process.wait()}")


@contextmanager
def running(command: list[str], env: dict[str, str]) -> Iterator[Worker]:
    """Start a worker's process, with some variables of its own; it is ended on leaving."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | env, cwd=ROOT)
    try:
        yield Worker(process)
    finally:
        process.kill()
        process.communicate()


def worker(engine: str, model: Path, num_threads: int, *, caching: bool) -> AbstractContextManager[Worker]:
    """Start an engine's process; it is ended on leaving."""
    command = [sys.executable, "-m", "benchmarks.engines", engine, str(model), "--threads", str(num_threads)]
    command += [] if caching else ["--no-caching"]
    env = {"OMP_NUM_THREADS": str(num_threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return running(command, env)


def measure(names: list[str], engines: list[str], options: argparse.Namespace) -> list[Figures]:
    """Run some workloads on all engines, in turns, and return one row of figures for each run."""
    pairs = [
        (name, engine)
        for name in names
        for engine in engines
        # It has no prefix cache: with the cache cold, warm or off, it does the same.
        if engine != "generate" or name not in ("W5-cold", "W5-warm")
    ]
    rows: list[Figures] = []
    probe = machine.Probe(options.threads)
    with ExitStack() as stack:
        workers: dict[tuple[str, bool], Worker] = {}
        for name, engine in pairs:
            key = (engine, name != "W5-off")
            if key not in workers:
                workers[key] = stack.enter_context(worker(engine, options.model, options.threads, caching=key[1]))
        before = probe.read_gb_s()
        for run, (name, engine) in itertools.product(range(options.runs), pairs):
            # A warm run must not find what a cold run of the same engine left, so they never share tokens.
            figures = workers[engine, name != "W5-off"].run(name, 2 * run + (name == "W5-warm"))
            after = probe.read_gb_s()
            row = {"engine": engine, "workload": name, "run": run, **figures, "probe_gb_s": [before, after]}
            print(describe(row), flush=True)
            rows.append(row)
            before = after
    return rows


def describe(row: Figures) -> str:
    """Return one run in one line."""
    gb_s = " to ".join(f"{value:.0f}" for value in row["probe_gb_s"] if value is not None)
    return (
        f"{row['workload']:8} {row['engine']:9} run {row['run']}: {row['wall_s']:7.2f} s, "
        f"{row['tokens_per_s']:6.1f} tokens/s, all started after {row['all_started_s']:6.2f} s"
        + (f" ({gb_s} GB/s)" if gb_s else "")
    )


def medians(rows: list[Figures]) -> dict[str, dict[str, Figures]]:
    """Return workload -> engine -> the medians of its runs."""
    table: dict[str, dict[str, Figures]] = {}
    for name, engine in dict.fromkeys((row["workload"], row["engine"]) for row in rows):
        runs = [row for row in rows if (row["workload"], row["engine"]) == (name, engine)]
        keys = ("wall_s", "tokens_per_s", "all_started_s", "peak_memory_gib")
        table.setdefault(name, {})[engine] = {key: statistics.median(row[key] for row in runs) for key in keys}
    return table


def judge(table: dict[str, dict[str, Figures]]) -> list[Figures]:
    """Return how the medians stand against the marks, for those that were measured."""
    verdicts = []
    for mark in MARKS:
        walls = [table.get(name, {}).get(engine, {}).get("wall_s") for engine, name in (mark.slow, mark.fast)]
        slow_s, fast_s = walls
        if slow_s is None or fast_s is None:
            continue
        what = f"{' '.join(mark.fast)} against {' '.join(mark.slow)}"
        verdicts.append({"what": what, "ratio": slow_s / fast_s, "at_least": mark.at_least})
    return verdicts


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default="W1,W2,W3,W5", help="of W1,W2,W3,W4,W5 (W5 is cold, warm and off)")
    parser.add_argument("--peers", default="generate,cb", help="of generate,cb,lossless; empty for Quire alone")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, default=None, help="a Qwen3 checkpoint; default: a random one")
    parser.add_argument("--name", default="throughput", help="the name of the file under results/")
    options = parser.parse_args()
    options.model = make_model.ensure() if options.model is None else options.model
    peers = [peer for peer in options.peers.split(",") if peer]
    engines = ["quire", *peers]
    unknown = set(engines) - set(ENGINES)
    if unknown:
        parser.error(f"unknown peers: {', '.join(sorted(unknown))}")
    rows: list[Figures] = []
    for chosen in options.workloads.split(","):
        names = [name for name in NAMES if name.partition("-")[0] == chosen or name == chosen]
        if not names:
            parser.error(f"unknown workload {chosen}; there are {', '.join(NAMES)}")
        rows += measure(names, engines, options)
    table = medians(rows)
    verdicts = judge(table)
    for verdict in verdicts:
        print(f"{verdict['what']}: {verdict['ratio']:.2f}x (mark: {verdict['at_least']}x)")
    settings = {"threads": options.threads, "runs": options.runs, "dtype": "bfloat16", "model": options.model.name}
    figures = {"settings": settings, "medians": table, "marks": verdicts, "runs": rows}
    print(machine.save(options.name, figures))


if __name__ == "__main__":
    main()
