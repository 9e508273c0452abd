"""A large simulated fleet: `python -m benchmarks.simulated_fleet`; the mark is 10,000 replicas and 1,000,000 requests.

Replicas of Llama 3.1 8B on an L4 serve single requests with the lengths of Azure's published trace of chats. Printed
are processor seconds, seconds, microseconds of a request, and the largest resident memory; the mark is 15 minutes and
8 GiB on one core. `--profile` prints where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import machine
from quire.measurement.bench.simulated_engine import engine_on_hardware
from quire.measurement.simulation.report import ServiceLevel, report_of
from quire.measurement.simulation.study import Scenario
from quire.measurement.simulation.traffic import TRAFFIC, SyntheticTraffic, TrafficShape

MARK_S, MARK_GIB = 900, 8
# Requests a second of each replica: about six in ten of its steps' time.
RATE = 0.5
LEVEL = ServiceLevel(ttft_s=2.0, tpot_s=0.1)
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def scenario(num_replicas: int, num_requests: int, block_size: int, routing: str, rate: float) -> Scenario:
    """Return the fleet and its traffic."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
        engine = engine_on_hardware({"model": folder}, "l4")
    values: dict[str, Any] = dict(TRAFFIC["azure-chat"])
    shape = TrafficShape(**values, num_requests=num_requests, rate=rate * num_replicas)
    return Scenario(
        settings=engine.settings({"block_size": block_size}),
        step_time=engine.step_time,
        traffic=lambda seed: SyntheticTraffic(shape, seed),
        num_replicas=num_replicas,
        routing=routing,
        level=LEVEL,
    )


def main() -> None:
    """Simulate, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=10_000)
    parser.add_argument("--requests", type=int, help="default: 100 for each replica")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--routing", default="least_loaded")
    parser.add_argument("--rate", type=float, default=RATE, help="requests a second of a replica")
    parser.add_argument("--no-leaps", action="store_true", help="take every step by itself")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    num_requests = given.requests or 100 * given.replicas
    fleet_of = scenario(given.replicas, num_requests, given.block_size, given.routing, given.rate)
    traffic = fleet_of.traffic(0)
    fleet = fleet_of.fleet(traffic, can_leap=not given.no_leaps)
    profile = cProfile.Profile()
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    if given.profile:
        profile.enable()
    totals = fleet.run(traffic.requests())
    if given.profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    report = report_of(fleet.samples, totals, LEVEL)
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    marks = f"marks at 10,000 replicas and 1,000,000 requests: {MARK_S} s, {MARK_GIB} GiB"
    print(
        f"{given.replicas:,} replicas, {num_requests:,} requests, blocks of {given.block_size}: {cpu_s:,.1f} processor "
        f"seconds ({wall_s:,.1f} s), {1e6 * cpu_s / num_requests:,.0f} microseconds a request, {gib:.2f} GiB ({marks})"
    )
    print(
        f"{totals.num_steps:,} steps, utilisation {100 * report.utilisation:.0f}%, goodput {100 * report.goodput:.1f}%"
        f", {report.num_evictions:,} blocks evicted, {report.num_preemptions:,} preemptions"
    )
    figures = {
        "replicas": given.replicas,
        "requests": num_requests,
        "block_size": given.block_size,
        "routing": given.routing,
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "gib": gib,
        "steps": totals.num_steps,
        "goodput": report.goodput,
    }
    print(machine.save("simulated_fleet", figures))


if __name__ == "__main__":
    main()
