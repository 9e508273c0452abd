"""Quire's memory manager beside vLLM's: `python -m benchmarks.memory --peer-python PATH`.

The managers take turns piece by piece, each in a process of its own, and what counts is the ratio of medians. The peer
runs under the interpreter of an environment that has vLLM; without `--peer-python` Quire is measured alone.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.memory_work import WORK
from benchmarks.throughput import ROOT, Worker, running

# Kinds of cache groups -> managers that are compared; Quire's first.
COMPARED = {
    "one group": ("quire", "vllm", "vllm-xxhash"),
    "full attention and a window": ("quire-window", "vllm-window", "vllm-window-xxhash"),
}
Times = dict[str, dict[str, list[float]]]


class Shown(NamedTuple):
    """The unit and the mark of one timed task.

    Args:
        what: description of the task.
        unit: unit of the figures.
        per_second: units in a second.
        at_least: the mark: a peer's time divided by Quire's.
    """

    what: str
    unit: str
    per_second: float
    at_least: float


SHOWN = {
    "distinct": Shown("a request that shares nothing", "us", 1e6, 3.0),
    "again": Shown("a request served before", "us", 1e6, 3.0),
    "evicting": Shown("a request that evicts", "us", 1e6, 3.0),
    "decode": Shown("a decode step of 256 sequences", "ms", 1e3, 3.0),
    "hash": Shown("hash 32k tokens", "ms", 1e3, 1.5),
    "look-up": Shown("look up 32k tokens", "ms", 1e3, 1.5),
}


def worker(manager: str, python: str) -> AbstractContextManager[Worker]:
    """Start a manager's process; it is ended on leaving."""
    command = [python, "-m", "benchmarks.memory_work", manager]
    return running(command, {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT / "src")})


def measure(pythons: dict[str, str], num_runs: int, names: list[str]) -> tuple[Times, dict[str, str]]:
    """Run some pieces of work on all managers, in turns.

    Args:
        pythons: manager -> the interpreter of its process.
        num_runs: runs of each piece of work.
        names: the pieces of work.

    Returns:
        Work -> manager -> seconds of each run; and manager -> its version.
    """
    times: Times = {name: {manager: [] for manager in pythons} for name in names}
    versions: dict[str, str] = {}
    with ExitStack() as stack:
        workers = {name: stack.enter_context(worker(name, python)) for name, python in pythons.items()}
        for run, name, manager in itertools.product(range(num_runs), names, pythons):
            answer = workers[manager].run(name, run)
            times[name][manager].append(answer["seconds"])
            versions[manager] = answer["version"]
    return times, versions


def medians(times: Times) -> dict[str, dict[str, float]]:
    """Return work -> manager -> the median of its runs."""
    return {name: {manager: statistics.median(runs) for manager, runs in row.items()} for name, row in times.items()}


def judge(table: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Return how the medians stand against the marks, for each peer that was measured; Quire is the first of a row."""
    verdicts = []
    for name, row in table.items():
        (_, own), *peers = row.items()
        verdicts += [
            {"work": name, "peer": peer, "ratio": seconds / own, "at_least": SHOWN[name].at_least}
            for peer, seconds in peers
        ]
    return verdicts


def describe(name: str, row: dict[str, float]) -> str:
    """Return the medians of one piece of work in one line."""
    shown = SHOWN[name]
    columns = [f"{shown.what:31}"]
    own = next(iter(row.values()))
    for idx, (manager, seconds) in enumerate(row.items()):
        ratio = f" ({seconds / own:.2f}x)" if idx else ""
        columns.append(f"{manager} {seconds * shown.per_second:.3g} {shown.unit}{ratio}")
    return "  ".join(columns) + f"  mark {shown.at_least}x"


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", type=Path, default=None, help="the interpreter of an environment with vLLM")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--name", default="memory", help="the name of the file under results/")
    options = parser.parse_args()
    figures = {}
    for groups, (own, *peers) in COMPARED.items():
        pythons = {own: sys.executable}
        if options.peer_python is not None:
            pythons |= {peer: str(options.peer_python) for peer in peers}
        times, versions = measure(pythons, options.runs, list(WORK))
        table = medians(times)
        print(groups)
        for name, row in table.items():
            print(describe(name, row))
        figures[groups] = {"managers": versions, "medians_s": table, "marks": judge(table), "runs_s": times}
    print(machine.save(options.name, figures))


if __name__ == "__main__":
    main()
