"""The effects of watermark, victim policy and swapping when memory is short: `python -m benchmarks.preemption`.

The real scheduler and the real memory serve requests that all queue at once for a pool that holds some twenty of them.
Time is that of a cost model, so that a run can be repeated to the digit: a step takes `STEP_S`, each of its tokens
`TOKEN_S`, and each byte between the tiers `1 / COPY_BYTES_PER_S`, none of it overlapped. The model's numbers are of an
8B model on one GPU; only their proportions matter.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.efficiency_traces import DATASETS, trace
from quire.measurement.simulation.replicas.executor import CountingExecutor
from quire.memory.manager import KVCacheManager
from quire.memory.specs import FullAttention
from quire.scheduling.preemption import TransferRates
from quire.scheduling.scheduler import Scheduler
from quire.sequences.params import SamplingParams
from quire.sequences.sequence import Request

SPEC = FullAttention(block_size=16, num_layers=32, num_kv_heads=8, head_dim=128)
NUM_BLOCKS, MAX_MODEL_LEN, MAX_NUM_SEQS, BUDGET, VOCAB = 512, 2048, 256, 2048, 32000
STEP_S, TOKEN_S, COPY_BYTES_PER_S = 10e-3, 50e-6, 20e9
COSTS = TransferRates(copy_bytes_per_s=COPY_BYTES_PER_S, prefill_tokens_per_s=1 / TOKEN_S)
RESULTS = Path(__file__).parent / "results" / "preemption.json"


class PreemptionCase(NamedTuple):
    """One compared configuration.

    Args:
        watermark: share of the blocks.
        policy, mode: policy and mode of preemption.
        host_blocks: number of blocks of the host tier; 0 for none.
        num_samples: number of samples of each request.
    """

    watermark: float
    policy: str
    mode: str
    host_blocks: int
    num_samples: int


class PreemptionFigures(NamedTuple):
    """The figures of one run.

    Args:
        num_preemptions: sequences that lost their memory.
        num_swaps: those of them that were swapped out.
        wasted: tokens computed more than once, as a share of those that had to be computed.
        moved_bytes: bytes moved between the tiers.
        tokens_per_s: generated, in the model's time.
    """

    num_preemptions: float
    num_swaps: float
    wasted: float
    moved_bytes: float
    tokens_per_s: float


def serve(case: PreemptionCase, num_requests: int, seed: int) -> PreemptionFigures:
    """Serve one trace to its end."""
    memory = KVCacheManager(
        [SPEC],
        NUM_BLOCKS,
        watermark=int(NUM_BLOCKS * case.watermark),
        key=b"benchmark",
        host_bytes=(case.host_blocks + 1) * SPEC.bytes_per_block if case.host_blocks else 0,
    )
    scheduler = Scheduler(
        memory,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=BUDGET,
        preemption_policy=case.policy,
        preemption_mode=case.mode,
    )
    scheduler.preemption.rates = COSTS
    works = trace(DATASETS["ShareGPT"], MAX_MODEL_LEN, num_requests, VOCAB, seed)
    for number, work in enumerate(works):
        params = SamplingParams(n=case.num_samples, max_tokens=work.num_new, ignore_eos=True, detokenize=False)
        total = len(work.prompt) + work.num_new
        scheduler.add(Request(str(number), work.prompt, params, total, frozenset(), arrival=number, seed=number))
    executor, seconds, num_computed, moved_bytes = CountingExecutor(), 0.0, 0, 0
    while scheduler.has_unfinished:
        plan = scheduler.plan(0)
        num_tokens = sum(len(item.token_ids) for item in plan.items)
        moved = sum(copy.src_tier is not copy.dst_tier for copy in plan.ops.copies) * SPEC.bytes_per_block
        seconds += STEP_S + num_tokens * TOKEN_S + moved / COPY_BYTES_PER_S
        num_computed += num_tokens
        moved_bytes += moved
        scheduler.update_from_results(plan.items, executor.execute(plan).items)
    # The last token of a sample is never computed.
    needed = sum(len(work.prompt) + case.num_samples * (work.num_new - 1) for work in works)
    generated = case.num_samples * sum(work.num_new for work in works)
    stats = scheduler.stats
    return PreemptionFigures(
        stats.num_preemptions, stats.num_swaps, num_computed / needed - 1, moved_bytes, generated / seconds
    )


def cases(num_samples: int) -> list[PreemptionCase]:
    """Return the compared cases for requests of `num_samples` samples."""
    ways = [("last", "recompute", 0), ("least_waste", "recompute", 0)]
    ways += [("last", "auto", 4 * NUM_BLOCKS), ("least_waste", "auto", 4 * NUM_BLOCKS)]
    return [PreemptionCase(watermark, *way, num_samples) for way in ways for watermark in (0.0, 0.01, 0.05)]


def mean(runs: Sequence[PreemptionFigures]) -> PreemptionFigures:
    """Return the means over runs."""
    return PreemptionFigures(*(statistics.fmean(values) for values in zip(*runs, strict=True)))


def main() -> None:
    """Measure all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("n  policy       mode       watermark  preempted  swapped  recomputed  moved GiB  tokens/s (least, most)")
    for case in [case for num_samples in (1, 4) for case in cases(num_samples)]:
        runs = [serve(case, options.requests // case.num_samples, seed) for seed in range(options.seeds)]
        figures, rates = mean(runs), [run.tokens_per_s for run in runs]
        rows.append({**case._asdict(), **figures._asdict(), "least": min(rates), "most": max(rates)})
        print(
            f"{case.num_samples}  {case.policy:11}  {case.mode:9}  {case.watermark:9.0%}  "
            f"{figures.num_preemptions:9.1f}  {figures.num_swaps:7.1f}  {figures.wasted:10.2%}  "
            f"{figures.moved_bytes / 2**30:9.1f}  {figures.tokens_per_s:8.1f} ({min(rates):.1f}, {max(rates):.1f})"
        )
    if options.save:
        RESULTS.write_text(json.dumps({"requests": options.requests, "seeds": options.seeds, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
