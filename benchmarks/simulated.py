"""The simulator beside the engine: `python -m benchmarks.simulated`.

One process loads the engine, measures steps of all kinds, runs W3 and W5, and measures steps again, since the rates of
a machine drift. The step times are fitted to the measured steps, of which W3 and W5 are none; then the same requests
are simulated. At last a server process gets a Poisson load over HTTP, and the simulator the same arrivals and lengths.
Printed are the simulator's figures divided by the engine's; the mark is 0.9 to 1.1.

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
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import machine, make_model
from quire.bench.load import poisson_arrivals
from quire.bench.step_probe import StepProbe, quality_lines
from quire.bench.workloads import BenchRequest, SyntheticWorkload, workload
from quire.config import EngineConfig
from quire.memory.recording.settings import MemorySettings
from quire.memory.specs import FullAttention
from quire.simulation.fit import fit_step_time, quality_of
from quire.simulation.fleet import SimulatedFleet
from quire.simulation.replica import ReplicaSettings
from quire.simulation.request import SimulatedRequest
from quire.simulation.routing import RoundRobin
from quire.simulation.step_time import FittedStepTime
from quire.simulation.tokens import TokenSpan

ROOT = Path(__file__).resolve().parent.parent
MARK = (0.9, 1.1)
BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 16, 1280, 1024
NUM_SEQS, STEP_TOKENS = 32, 512
# The served load, and its share of the rate at which W3's requests were served.
LOAD = SyntheticWorkload(num_prompts=60, input_len=160, output_len=48, lengths="uniform", spread=0.8, workload_seed=11)
LOAD_SHARE = 0.5
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


def measure_offline(probe: StepProbe, names: Sequence[str], num_runs: int) -> dict[str, list[dict[str, float]]]:
    """Return the figures of some runs of each workload, in turns."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for run in range(num_runs):
        for name in names:
            work = workload(name, run, range(probe.resolved.vocab_size))
            times = probe.time(work.requests)
            zeros = [0.0] * len(times)
            measured[name].append(figures(zeros, [row[0] for row in times], [row[-1] for row in times], work.num_new))
    return measured


def measure_served(model: str, num_threads: int, rate: float) -> dict[str, float]:
    """Return the figures of a Poisson load on a server of its own process."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options(num_threads).items()]
    command = [sys.executable, "-m", "quire", "serve", model, "--port", "0", "--log-level", "warning", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
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


def main() -> None:
    """Measure, simulate, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="checkpoint, or bundled (default: Qwen3-0.6B's shape with random weights)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--no-server", action="store_true")
    given = parser.parse_args()
    is_cpu = given.clock == "cpu"
    num_threads = 1 if is_cpu else given.threads
    model = given.model or str(make_model.ensure())
    config = EngineConfig.from_options(model=model, skip_tokenizer_init=True, **options(num_threads))
    probe = StepProbe(config, time.process_time if is_cpu else time.perf_counter)
    try:
        probe.measure()
        measured = measure_offline(probe, ("W3", "W5-cold"), given.runs)
        num_before = len(probe.steps)
        probe.measure(seed=1)
    finally:
        probe.close()
    step_time, quality = fit_step_time(probe.steps)
    print("\n".join(quality_lines(quality, step_time)))
    halves = [quality_of(step_time, part).total_error for part in (probe.steps[:num_before], probe.steps[num_before:])]
    print(
        f"The steps before the runs are fitted with {100 * halves[0]:+.1f}%, those after with {100 * halves[1]:+.1f}%"
    )
    rows = []
    for name, num_shared in (("W3", 0), ("W5-cold", 512)):
        requests = workload(name, 0, range(256)).requests
        mine = simulate(simulated_requests(requests, [0.0] * len(requests), num_shared), step_time)
        rows.append(compare(name, mine, measured[name]))
    if not (given.no_server or is_cpu):
        w3_s = sum(request.num_new for request in workload("W3", 0).requests) / rows[0]["simulated"]["tokens_per_s"]
        rate = LOAD_SHARE * 16 / w3_s
        served = measure_served(model, num_threads, rate)
        requests = LOAD.requests(LOAD_IDS)
        arrivals = poisson_arrivals(rate, len(requests), LOAD.workload_seed)
        rows.append(
            compare(f"Poisson {rate:.2g}/s", simulate(simulated_requests(requests, arrivals), step_time), [served])
        )
    content = {"model": model, "threads": num_threads, "clock": given.clock, "fit": quality._asdict(), "rows": rows}
    print(machine.save("simulated", {**content, "coefficients": step_time.as_json()}))


if __name__ == "__main__":
    main()
