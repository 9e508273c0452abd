"""The simulator beside the engine: `python -m benchmarks.simulated`.

One process loads the engine, measures steps of all kinds, runs W3 and W5, and measures steps again, since the rates of
a machine drift. The step times are fitted to the measured steps, of which W3 and W5 are none; then the same requests
are simulated. At last a server process gets a Poisson load over HTTP, and the simulator the same arrivals and lengths.
Printed are the simulator's figures divided by the engine's; the mark is 0.9 to 1.1.

`--part NAME` runs one part in a process of its own, `before`, `runs`, `after`, `served` and `report` in this order, and
keeps what it measures beside the checkpoint's folder; `before` begins anew.

`--clock cpu` counts the processor time of one thread in place of the time that passes, for a machine that does other
work meanwhile; there is no server then.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import machine, make_model
from quire.config import EngineConfig
from quire.measurement.bench.load import poisson_arrivals
from quire.measurement.bench.step_probe import StepProbe, quality_lines
from quire.measurement.bench.workloads import BenchRequest, SyntheticWorkload, workload
from quire.measurement.simulation.fleet import SimulatedFleet
from quire.measurement.simulation.replicas.fit import MeasuredStep, fit_step_time, quality_of
from quire.measurement.simulation.replicas.replica_settings import ReplicaSettings
from quire.measurement.simulation.replicas.step_time import FittedStepTime, StepItem
from quire.measurement.simulation.replicas.tokens import TokenSpan
from quire.measurement.simulation.request import SimulatedRequest
from quire.measurement.simulation.routing import RoundRobin
from quire.memory.recording.settings import MemorySettings
from quire.memory.specs import FullAttention
from quire.models.checkpoints.checkpoint import locate

ROOT = Path(__file__).resolve().parent.parent
MARK = (0.9, 1.1)
BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 16, 1280, 1024
NUM_SEQS, STEP_TOKENS = 32, 512
# The served load, and its share of the rate at which W3's requests were served.
LOAD = SyntheticWorkload(num_prompts=60, input_len=160, output_len=48, lengths="uniform", spread=0.8, workload_seed=11)
LOAD_SHARE = 0.5
# Name of a workload -> number of tokens that all of its requests begin with.
WORKLOADS = {"W3": 0, "W5-cold": 512}
# Parts that one engine can measure, in order.
ENGINE_PARTS = ("before", "runs", "after")
# The tokens of `quire bench serve`: lengths are drawn from the same random numbers.
LOAD_IDS = range(256, 1000)


def settings() -> ReplicaSettings:
    """Return the options of the simulated engine, which are those of the real one."""
    memory = MemorySettings(
        specs=(FullAttention(block_size=BLOCK_SIZE),), num_blocks=NUM_BLOCKS, watermark=int(0.01 * NUM_BLOCKS)
    )
    return ReplicaSettings(memory=memory, max_num_seqs=NUM_SEQS, max_num_batched_tokens=STEP_TOKENS)


def options(num_threads: int) -> dict[str, Any]:
    """Return the options of the real engine."""
    return {
        "num_threads": num_threads,
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": NUM_BLOCKS,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": NUM_SEQS,
        "max_num_batched_tokens": STEP_TOKENS,
    }


def simulated_requests(
    requests: Sequence[BenchRequest], arrivals: Sequence[float], num_shared: int = 0
) -> list[SimulatedRequest]:
    """Return requests of the same lengths, of which the first tokens may be shared by all."""
    made = []
    for idx, ((prompt, num_new), arrival_s) in enumerate(zip(requests, arrivals, strict=True)):
        own = TokenSpan(2 * idx + 1, 0, len(prompt) - num_shared)
        spans = (TokenSpan(0, 0, num_shared), own) if num_shared else (own,)
        made.append(SimulatedRequest(arrival_s, spans, num_new, 2 * idx + 2))
    return made


def figures(
    arrivals: Sequence[float], first: Sequence[float], ended: Sequence[float], num_new: int
) -> dict[str, float]:
    """Return what is compared: throughput, mean time to first token, and mean time of a whole answer."""
    duration_s = max(ended) - min(arrivals)
    waits = [moment - arrival for moment, arrival in zip(first, arrivals, strict=True)]
    wholes = [moment - arrival for moment, arrival in zip(ended, arrivals, strict=True)]
    return {
        "tokens_per_s": num_new / duration_s,
        "ttft_mean_s": statistics.fmean(waits),
        "e2e_mean_s": statistics.fmean(wholes),
    }


def simulate(requests: list[SimulatedRequest], model: FittedStepTime) -> dict[str, float]:
    """Return the figures of simulated requests."""
    fleet = SimulatedFleet(settings(), model, RoundRobin())
    fleet.run(requests)
    samples = fleet.samples
    return figures(samples.arrivals_s, samples.first_s, samples.ended_s, sum(samples.num_new))


def measure_offline(probe: StepProbe, names: Iterable[str], num_runs: int) -> dict[str, list[dict[str, float]]]:
    """Return the figures of some runs of each workload, in turns."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for run in range(num_runs):
        for name in names:
            work = workload(name, run, range(probe.resolved.vocab_size))
            times = probe.time(work.requests)
            zeros = [0.0] * len(times)
            measured[name].append(figures(zeros, [row[0] for row in times], [row[-1] for row in times], work.num_new))
    return measured


def link_with_tokenizer(model: str, folder: str) -> str:
    """Return a model that has a tokenizer, as servers need.

    A random one is linked with that of the bundled model, and each further id is a word: random weights draw any of
    them, and a token without a text would be no event of a stream.
    """
    source, bundled = locate(model), locate("bundled")
    if (source / "tokenizer.json").exists():
        return model
    for path in (*source.iterdir(), bundled / "tokenizer_config.json"):
        Path(folder, path.name).symlink_to(path.resolve())
    tokenizer = json.loads((bundled / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    known = {*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocab_size = json.loads((source / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    vocab |= {f"\u0120w{idx}": idx for idx in range(vocab_size) if idx not in known}
    Path(folder, "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return folder


def measure_served(model: str, num_threads: int, rate: float) -> dict[str, float]:
    """Return the figures of a Poisson load on a server of its own process."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options(num_threads).items()]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [
                *(sys.executable, "-m", "quire", "serve", link_with_tokenizer(model, folder)),
                *("--port", "0", "--log-level", "warning", *flags),
            ],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        ) as server,
    ):
        try:
            assert server.stdout is not None
            address = re.search(r"http://\S+", server.stdout.readline())
            if address is None:
                raise RuntimeError("the server told no address")
            bench = [
                sys.executable,
                "-m",
                "quire",
                "bench",
                "serve",
                "--url",
                address[0],
                "--rate",
                str(rate),
                "--json",
            ]
            bench += [f"--{name.replace('_', '-')}={value}" for name, value in asdict(LOAD).items()]
            # Twice: the first run warms up; its prompts would be found in the cache of the second, but for its seed.
            warm_up = [*bench, "--workload-seed=99", "--num-prompts=8"]
            subprocess.run(warm_up, check=True, capture_output=True, cwd=ROOT, timeout=600)
            done = subprocess.run(bench, check=True, capture_output=True, text=True, cwd=ROOT, timeout=3600)
        finally:
            server.send_signal(signal.SIGINT)
    report = json.loads(done.stdout)["report"]
    return {
        "tokens_per_s": report["output_tokens_per_s"],
        "ttft_mean_s": report["time_to_first_token_s"]["mean"],
        "e2e_mean_s": report["end_to_end_s"]["mean"],
    }


def compare(name: str, mine: dict[str, float], runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Print the simulator's figures divided by the medians of the engine's, and return all."""
    row: dict[str, Any] = {"name": name, "simulated": mine, "measured": list(runs), "ratios": {}}
    for figure, value in mine.items():
        median = statistics.median(run[figure] for run in runs)
        ratio = row["ratios"][figure] = value / median
        word = "within the mark" if MARK[0] <= ratio <= MARK[1] else "outside of it"
        print(f"{name:10} {figure:14} simulated {value:9.4g}, measured {median:9.4g}: {ratio:.3f}, {word}", flush=True)
    return row


def steps_json(steps: Sequence[MeasuredStep]) -> list[Any]:
    """Return measured steps as JSON."""
    return [[[list(part) for part in parts], seconds] for parts, seconds in steps]


def read_steps(rows: list[Any]) -> list[MeasuredStep]:
    """Return the steps that `steps_json` wrote."""
    return [MeasuredStep(tuple(StepItem(*part) for part in parts), seconds) for parts, seconds in rows]


def measure_engine(parts: Sequence[str], given: argparse.Namespace, state: dict[str, Any]) -> None:
    """Measure parts in one engine, and add the results to the state."""
    is_cpu = state["clock"] == "cpu"
    config = EngineConfig.from_options(model=state["model"], skip_tokenizer_init=True, **options(state["threads"]))
    probe = StepProbe(config, time.process_time if is_cpu else time.perf_counter)
    try:
        for part in parts:
            if part == "runs":
                state["runs"] = measure_offline(probe, WORKLOADS, given.runs)
            else:
                known = len(probe.steps)
                probe.measure(seed=int(part == "after"))
                state[part] = steps_json(probe.steps[known:])
    finally:
        probe.close()


def fit(state: dict[str, Any]) -> FittedStepTime:
    """Return the model that fits the measured steps, and print how well it does."""
    halves = [read_steps(state[part]) for part in ("before", "after") if part in state]
    step_time, quality = fit_step_time([step for half in halves for step in half])
    print("\n".join(quality_lines(quality, step_time)))
    state["fit"] = quality._asdict()
    if len(halves) == 2:
        first, second = (quality_of(step_time, half).total_error for half in halves)
        print(f"The steps before the runs are fitted with {100 * first:+.1f}%, those after with {100 * second:+.1f}%")
    return step_time


def serve_load(state: dict[str, Any]) -> None:
    """Measure the served load, at a share of the rate at which the simulator serves W3, and add it to the state."""
    requests = workload("W3", 0, range(256)).requests
    mine = simulate(simulated_requests(requests, [0.0] * len(requests)), fit(state))
    seconds = sum(request.num_new for request in requests) / mine["tokens_per_s"]
    rate = state["rate"] = LOAD_SHARE * len(requests) / seconds
    state["served"] = measure_served(state["model"], state["threads"], rate)


def report(state: dict[str, Any]) -> None:
    """Simulate what was measured, print the ratios and save all."""
    step_time = fit(state)
    rows = []
    for name, num_shared in WORKLOADS.items():
        requests = workload(name, 0, range(256)).requests
        mine = simulate(simulated_requests(requests, [0.0] * len(requests), num_shared), step_time)
        rows.append(compare(name, mine, state["runs"][name]))
    if "served" in state:
        requests, rate = LOAD.requests(LOAD_IDS), state["rate"]
        arrivals = poisson_arrivals(rate, len(requests), LOAD.workload_seed)
        mine = simulate(simulated_requests(requests, arrivals), step_time)
        rows.append(compare(f"Poisson {rate:.2g}/s", mine, [state["served"]]))
    content = {name: state[name] for name in ("model", "threads", "clock", "fit")}
    print(machine.save("simulated", {**content, "rows": rows, "coefficients": step_time.as_json()}))


def main() -> None:
    """Measure, simulate, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="checkpoint, or bundled (default: Qwen3-0.6B's shape with random weights)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--no-server", action="store_true")
    parser.add_argument("--part", choices=(*ENGINE_PARTS, "served", "report"), help="run this part only")
    given = parser.parse_args()
    kept = make_model.FOLDER / "simulated_parts.json"
    state: dict[str, Any]
    if given.part in (None, "before"):
        is_cpu = given.clock == "cpu"
        model = given.model or str(make_model.ensure())
        state = {"model": model, "threads": 1 if is_cpu else given.threads, "clock": given.clock}
    else:
        state = json.loads(kept.read_text(encoding="utf-8"))
    parts = ENGINE_PARTS if given.part is None else [part for part in ENGINE_PARTS if part == given.part]
    if parts:
        measure_engine(parts, given, state)
    if given.part == "served" or (given.part is None and not given.no_server and state["clock"] == "wall"):
        serve_load(state)
    if given.part is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(state), encoding="utf-8")
    if given.part in (None, "report"):
        report(state)


if __name__ == "__main__":
    main()
