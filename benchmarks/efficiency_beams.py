"""The blocks that the beams of a search share: `python -m benchmarks.efficiency_beams`.

As `benchmarks.efficiency` measures samples. What beams share depends on where they part, and so on what the model says:
*bundled* is a model of language, *simulated* gives tokens that are as likely as a hash of what is before them says.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.efficiency import ENGINES, observe
from benchmarks.efficiency_moments import Moment, saved_by_sharing
from benchmarks.efficiency_traces import DATASETS, SPREAD, DatasetRequest, trace
from quire.engine.engine import Engine
from quire.sequences.params import SamplingParams

WIDTHS = (2, 4, 6)
NUM_REQUESTS = {"ShareGPT": 90, "Alpaca": 400}
BLOCK_SIZE = 16
# The longest request fits with six beams that share no more than its prompt.
POOL_BLOCKS = {"ShareGPT": 1024, "Alpaca": 320}
# PagedAttention (SOSP 2023), in percent of blocks: from 2 beams to 6.
PUBLISHED = {"Alpaca": [37.6, 55.2], "ShareGPT": [44.3, 66.3]}


class BeamRun(NamedTuple):
    """One measurement.

    Args:
        engine: a name in `ENGINES`.
        dataset: a name in `DATASETS`.
        width: beams of each request.
        num_requests: requests, all queued at once.
    """

    engine: str
    dataset: str
    width: int
    num_requests: int


def moments(engine: Engine, works: list[DatasetRequest], width: int) -> Iterator[Moment]:
    """Search for all requests, queued at once, and yield what memory holds after every step."""
    for number, work in enumerate(works):
        params = SamplingParams(beam_width=width, max_tokens=work.num_new, ignore_eos=True, detokenize=False)
        engine.add_request(str(number), work.prompt, params)
    while engine.has_unfinished:
        engine.step()
        yield observe(engine.scheduler)


def measure(run: BeamRun) -> dict[str, Any]:
    """Return one run's figures, averaged over the steps in which memory was full."""
    num_blocks = POOL_BLOCKS[run.dataset]
    engine = ENGINES[run.engine](
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_blocks,
        max_num_seqs=num_blocks * run.width,
        max_num_batched_tokens=num_blocks * (BLOCK_SIZE + run.width),
    )
    works = trace(DATASETS[run.dataset], engine.config.max_model_len, run.num_requests, engine.config.vocab_size)
    full = [moment for moment in moments(engine, works, run.width) if moment.is_full and moment.sequences]
    if not full:
        raise RuntimeError(f"memory was never full: {run}")
    stats = engine.stats
    engine.close()
    return {
        **run._asdict(),
        "pool_blocks": num_blocks,
        "num_full_steps": len(full),
        "num_preemptions": stats.num_preemptions,
        "wasted_tokens": stats.wasted_tokens,
        "copies_per_step": stats.num_copies / stats.num_steps,
        "mean_sequences": fmean(len(moment.sequences) for moment in full),
        "saved_by_sharing": fmean(map(saved_by_sharing, full)),
    }


def runs() -> list[BeamRun]:
    """Return all runs."""
    each = itertools.product(ENGINES, DATASETS, WIDTHS)
    return [BeamRun(engine, dataset, width, NUM_REQUESTS[dataset]) for engine, dataset, width in each]


def main() -> None:
    """Measure, print and save."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = []
    for run in runs():
        rows.append(measure(run))
        saved, (low, high) = 100 * rows[-1]["saved_by_sharing"], PUBLISHED[run.dataset]
        what = f"{run.dataset:8} {run.engine:9} {run.width} beams"
        print(f"{what}: sharing saves {saved:.1f} % (published: {low} to {high} %)", flush=True)
    print(machine.save("efficiency_beams", {"spread": SPREAD, "published_percent": PUBLISHED, "rows": rows}))


if __name__ == "__main__":
    main()
