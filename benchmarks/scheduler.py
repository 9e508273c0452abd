"""The cost of the control plane per step: `python -m benchmarks.scheduler`.

The real scheduler on the real memory, with many sequences in decode; the data plane only draws a fixed token. Timed is
all that a step does besides the model: planning, block tables, taking in the tokens, publishing full blocks.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from benchmarks import machine
from quire.memory.manager import KVCacheManager
from quire.memory.specs import FullAttention
from quire.scheduling.scheduler import Scheduler
from quire.sequences.params import SamplingParams
from quire.sequences.sequence import Request
from tests.scheduling.simulated_executor import CountingExecutor

BLOCK_SIZE, NUM_PROMPT, VOCAB = 16, 1024, 150000
MARKS_MS = {256: 0.5, 1000: 2.0}


def scheduler_in_decode(num_seqs: int, num_steps: int, *, caching: bool) -> Scheduler:
    """Return a scheduler whose sequences have all computed their prompts and decode for `num_steps` steps and more."""
    blocks_each = -(-(NUM_PROMPT + num_steps) // BLOCK_SIZE) + 2
    memory = KVCacheManager(
        [FullAttention(block_size=BLOCK_SIZE)], num_seqs * blocks_each, enable_prefix_caching=caching, key=b"benchmark"
    )
    scheduler = Scheduler(memory, max_num_seqs=num_seqs, max_num_batched_tokens=NUM_PROMPT * num_seqs)
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=num_steps + BLOCK_SIZE, ignore_eos=True, detokenize=False)
    for idx in range(num_seqs):
        # Lengths differ by less than a block, so that sequences do not all need a new block in the same step.
        prompt = [rng.randrange(VOCAB) for _ in range(NUM_PROMPT - idx % BLOCK_SIZE)]
        total = len(prompt) + num_steps + BLOCK_SIZE
        scheduler.add(Request(str(idx), prompt, params, total, frozenset(), arrival=idx, seed=0))
    return scheduler


def step(scheduler: Scheduler, executor: CountingExecutor, tick: int) -> tuple[float, float]:
    """Run one step and return the seconds that planning and taking in took."""
    started = time.perf_counter()
    plan = scheduler.plan(tick)
    planned = time.perf_counter()
    result = executor.execute(plan)
    executed = time.perf_counter()
    scheduler.update_from_results(plan.items, result.items)
    return planned - started, time.perf_counter() - executed


def measure(num_seqs: int, num_steps: int, *, caching: bool) -> dict[str, Any]:
    """Return milliseconds a step: the median, the 99th percentile, and the median's two parts."""
    scheduler = scheduler_in_decode(num_seqs, num_steps, caching=caching)
    executor = CountingExecutor()
    step(scheduler, executor, 0)
    if len(scheduler.running) != num_seqs or scheduler.waiting:
        raise RuntimeError(f"{len(scheduler.running)} of {num_seqs} sequences run")
    times = [step(scheduler, executor, tick) for tick in range(1, num_steps + 1)]
    totals = sorted(1e3 * (planning + taking_in) for planning, taking_in in times)
    if len(scheduler.running) != num_seqs:
        raise RuntimeError("sequences ended while they were measured")
    return {
        "num_seqs": num_seqs,
        "caching": caching,
        "num_steps": num_steps,
        "ms_median": statistics.median(totals),
        "ms_p99": totals[int(0.99 * len(totals))],
        "ms_plan": 1e3 * statistics.median(planning for planning, _ in times),
        "ms_advance": 1e3 * statistics.median(taking_in for _, taking_in in times),
    }


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqs", default="256,1000", help="how many sequences decode")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    rows = [
        measure(int(num_seqs), options.steps, caching=caching)
        for num_seqs in options.seqs.split(",")
        for caching in (True, False)
    ]
    for row in rows:
        mark = f" (mark: < {MARKS_MS[row['num_seqs']]} ms)" if row["num_seqs"] in MARKS_MS else ""
        print(
            f"{row['num_seqs']:5} sequences, prefix caching {'on ' if row['caching'] else 'off'}: "
            f"{row['ms_median']:.3f} ms a step{mark}, p99 {row['ms_p99']:.3f}; "
            f"plan {row['ms_plan']:.3f}, advance {row['ms_advance']:.3f}"
        )
    print(machine.save("scheduler", {"rows": rows}))


if __name__ == "__main__":
    main()
