"""The utilisation of the blocks: `python -m benchmarks.efficiency`; its chart: `python -m benchmarks.efficiency_chart`.

Requests with the mean lengths of two datasets queue for a pool that is too small for them. After every step, what the
block tables hold is compared with the bytes of the blocks that the memory manager has given out, and with what
contiguous reservations would have taken for the same sequences at the same moment. Averages are over the steps in which
memory was full: requests waited, and slots and token budget are large enough that only memory kept them out.

Two engines are measured. `simulated` is the engine with a data plane of plain dictionaries, for models of 2048 tokens:
the real scheduler and the real memory manager, and what they plan is read back token by token. `bundled` is the whole
engine with the model that ships with Quire, of 1024 tokens.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.efficiency_moments import (
    RESERVES,
    HeldSequence,
    Moment,
    bound,
    paged_share,
    reserved_share,
    saved_by_sharing,
)
from benchmarks.efficiency_traces import DATASETS, SPREAD, DatasetRequest, trace
from quire.config import EngineConfig, Machine, ModelFacts, resolve
from quire.engine.engine import Engine
from quire.engine.llm import LLM
from quire.measurement.simulation.replicas.executor import SimulatedExecutor
from quire.memory.manager import KVCacheManager
from quire.memory.specs import FullAttention
from quire.scheduling.scheduler import Scheduler
from quire.sequences.params import SamplingParams

SIMULATED_VOCAB, SIMULATED_LEN = 256, 2048
POOL_TOKENS = {"ShareGPT": 16384, "Alpaca": 4096}
BLOCK_SIZES = (16, 8)
SAMPLES = (2, 4, 6)
# PagedAttention (SOSP 2023), in percent: of KV bytes that hold tokens, and of blocks saved by sharing.
PUBLISHED_SHARES = {"maximum": 20.4, "power of two": 26.8, "oracle": 38.2, "paged": 96.3}
PUBLISHED_SAVINGS = {"Alpaca": {"2": 6.1, "4": 8.5, "6": 9.8}}


class FillRun(NamedTuple):
    """One measurement.

    Args:
        engine: a name in `ENGINES`.
        dataset: a name in `DATASETS`.
        block_size: tokens of a block.
        num_samples: samples of each request.
        num_requests: requests, all queued at once.
    """

    engine: str
    dataset: str
    block_size: int
    num_samples: int
    num_requests: int


def options_of(run: FillRun) -> dict[str, int]:
    """Return the engine's options: a small pool, and slots and a token budget that never limit admission."""
    num_blocks = POOL_TOKENS[run.dataset] // run.block_size
    return {
        "block_size": run.block_size,
        "num_kv_blocks": num_blocks,
        "max_num_seqs": num_blocks * run.num_samples,
        "max_num_batched_tokens": num_blocks * (run.block_size + run.num_samples),
    }


def simulated(**options: int) -> Engine:
    """Return an engine whose data plane is simulated."""
    facts = ModelFacts(max_position=SIMULATED_LEN, bytes_per_token=4, vocab_size=SIMULATED_VOCAB, num_parameters=1)
    found = Machine(device="cpu", available_bytes=1 << 30, num_threads=1)
    config = resolve(EngineConfig.from_options(**options), found, facts)
    memory = KVCacheManager(
        [FullAttention(block_size=config.block_size)],
        config.num_blocks,
        watermark=int(config.num_blocks * config.watermark),
        key=b"benchmark",
    )
    scheduler = Scheduler(
        memory,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    executor = SimulatedExecutor(config.block_size, config.vocab_size)
    return Engine(config, scheduler, executor, None, end_token_ids=frozenset(), cache_name="simulated")


def bundled(**options: int) -> Engine:
    """Return an engine with the model that ships with Quire."""
    return LLM("bundled", skip_tokenizer_init=True, **options).engine


ENGINES: dict[str, Callable[..., Engine]] = {"simulated": simulated, "bundled": bundled}


def moments(engine: Engine, works: Iterable[DatasetRequest], num_samples: int) -> Iterator[Moment]:
    """Serve requests, all queued at once, and yield what memory holds after every step."""
    for number, work in enumerate(works):
        params = SamplingParams(n=num_samples, max_tokens=work.num_new, ignore_eos=True, detokenize=False, seed=number)
        engine.add_request(str(number), work.prompt, params)
    while engine.has_unfinished:
        engine.step()
        yield observe(engine.scheduler)


def observe(scheduler: Scheduler) -> Moment:
    """Return what memory holds now, between two steps."""
    memory = scheduler.memory
    sequences = tuple(
        HeldSequence(
            sequence.num_prompt,
            sequence.request.max_total_tokens,
            sequence.num_computed,
            memory.block_table(sequence.seq_id),
        )
        for sequence in scheduler.running
    )
    # A sequence that waits now was refused by the last plan: none starts to wait between two plans.
    return Moment(sequences, memory.block_size, memory.usage().used, is_full=bool(scheduler.waiting))


def measure(run: FillRun) -> dict[str, Any]:
    """Return one run's figures, averaged over the steps in which memory was full."""
    engine = ENGINES[run.engine](**options_of(run))
    config = engine.config
    works = trace(DATASETS[run.dataset], config.max_model_len, run.num_requests, config.vocab_size)
    seen = list(moments(engine, works, run.num_samples))
    full = [moment for moment in seen if moment.is_full and moment.sequences]
    if not full:
        raise RuntimeError(f"memory was never full: {run}")
    if engine.usage().used:
        raise RuntimeError(f"{engine.usage().used} blocks are used after all requests have finished")
    num_preemptions = engine.stats.num_preemptions
    engine.close()

    def mean(figure: Callable[[Moment], float]) -> float:
        return fmean(map(figure, full))

    shares = {
        name: mean(partial(reserved_share, reserve, max_model_len=config.max_model_len))
        for name, reserve in RESERVES.items()
    }
    return {
        **run._asdict(),
        "max_model_len": config.max_model_len,
        "pool_blocks": config.num_blocks,
        "mean_prompt": fmean(len(work.prompt) for work in works),
        "mean_output": fmean(work.num_new for work in works),
        "num_steps": len(seen),
        "num_full_steps": len(full),
        "num_preemptions": num_preemptions,
        "mean_sequences": mean(lambda moment: len(moment.sequences)),
        "mean_stored": fmean(held.num_stored for moment in full for held in moment.sequences),
        "used_share_of_pool": mean(lambda moment: moment.num_used / config.num_blocks),
        "shares": shares | {"paged": mean(paged_share)},
        "bound": mean(lambda moment: bound([held.num_stored for held in moment.sequences], moment.block_size)),
        "saved_by_sharing": mean(saved_by_sharing),
    }


def runs() -> list[FillRun]:
    """Return all runs: how full blocks are, for both sizes of blocks; then what samples of one prompt share."""
    filling = itertools.product(ENGINES, DATASETS, BLOCK_SIZES)
    sharing = itertools.product(ENGINES, DATASETS, SAMPLES)
    alone, shared = {"ShareGPT": 300, "Alpaca": 1200}, {"ShareGPT": 90, "Alpaca": 400}
    return [FillRun(engine, dataset, size, 1, alone[dataset]) for engine, dataset, size in filling] + [
        FillRun(engine, dataset, 16, num_samples, shared[dataset]) for engine, dataset, num_samples in sharing
    ]


def describe(row: dict[str, Any]) -> str:
    """Return a run's figures in one line."""
    what = f"{row['dataset']:8} {row['engine']:9} blocks of {row['block_size']:2}, n={row['num_samples']}"
    if row["num_samples"] > 1:
        published = PUBLISHED_SAVINGS.get(row["dataset"], {}).get(str(row["num_samples"]))
        beside = "" if published is None else f" (published: {published} %)"
        return f"{what}: sharing saves {100 * row['saved_by_sharing']:.1f} %{beside}"
    shares = ", ".join(f"{name} {100 * share:.1f}" for name, share in row["shares"].items())
    return f"{what}: {shares}; bound {100 * row['bound']:.1f} %"


def main() -> None:
    """Measure, print and save."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = []
    for run in runs():
        rows.append(measure(run))
        print(describe(rows[-1]), flush=True)
    published = {"shares": PUBLISHED_SHARES, "saved_by_sharing": PUBLISHED_SAVINGS}
    print(machine.save("efficiency", {"spread": SPREAD, "published_percent": published, "rows": rows}))


if __name__ == "__main__":
    main()
