"""Host time of a step with a prompt on a GPU, before its launches: `python -m benchmarks.step_plans`; needs Triton.

Sequences decode beside the prompt of a new one, which no captured step is for. The host lays the rows out as tensors,
and plans the attention of one cache group, which has the shape of Llama-3.1-8B's on a GPU of 132 processors; nothing is
copied or launched. Printed are milliseconds of processor time, the least and the median, with compiled code and with
the loops that are its slow twins.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections.abc import Callable
from functools import partial
from itertools import count
from statistics import median
from typing import Final
from unittest.mock import patch

import torch

from benchmarks.captured_plans import GROUP, HEAD_DIM, KV_HEADS, PROCESSORS
from benchmarks.gpu.memory import BLOCK_SIZE
from quire.execution.step.batch import BatchBuilder, BlockTable
from quire.execution.step.row_layout import layout_kernels
from quire.models.specs.spec import TokenCacheShape
from quire.ops.interface.ops import AttentionBatch
from quire.ops.triton.attention.shared_prefixes import SharingRule
from quire.ops.triton.attention.step_numbers import StepCut, number_work, step_kernels
from quire.ops.triton.launches import LAUNCH_BYTES
from quire.ops.triton.tiles import decode_tile, prefill_tile, shared_tile
from quire.scheduling.plan import ScheduledSequence

ELEMENT_BYTES, CAPABILITY = 2, (9, 0)
# Sequences, tokens of each, tokens that all have in common, tokens of the prompt.
STEPS: Final = (
    (64, 1024, 0, 512),
    (255, 1024, 0, 512),
    (255, 1024, 896, 512),
    (255, 8192, 0, 512),
    (255, 8192, 8064, 512),
    (255, 8192, 2048, 2048),
)


def make_step(
    num_sequences: int, context: int, shared: int, prompt: int
) -> tuple[BatchBuilder, list[ScheduledSequence]]:
    """Return a builder that has the block tables of a step, and the step's items."""
    rng, ids = random.Random(0), count(1)
    builder = BatchBuilder(BLOCK_SIZE, "cpu", [TokenCacheShape(KV_HEADS, HEAD_DIM)])
    common = [next(ids) for _ in range(shared // BLOCK_SIZE)]
    items = []
    starts = [context - rng.randrange(BLOCK_SIZE) for _ in range(num_sequences)]
    for seq_id, (start, length) in enumerate([*((start, 1) for start in starts), (0, prompt)]):
        table, known = BlockTable(), common if start else []
        num_own = -(-(start + length) // BLOCK_SIZE) - len(known)
        table.ids = array("q", [*known, *(next(ids) for _ in range(num_own))])
        builder.tables[seq_id] = (table,)
        items.append(ScheduledSequence(seq_id, start, [5] * length, (), 1, None))
    return builder, items


def cut_of() -> StepCut:
    """Return how steps are cut."""
    decode, prefill = (
        decode_tile(HEAD_DIM, GROUP, ELEMENT_BYTES),
        prefill_tile(HEAD_DIM, GROUP, ELEMENT_BYTES, CAPABILITY),
    )
    tile, token_bytes = shared_tile(HEAD_DIM, GROUP, ELEMENT_BYTES, CAPABILITY), 2 * HEAD_DIM * ELEMENT_BYTES
    rule = SharingRule.of(tile, decode, GROUP, BLOCK_SIZE, token_bytes, HEAD_DIM, LAUNCH_BYTES / KV_HEADS)
    return StepCut(GROUP, decode, prefill, KV_HEADS, PROCESSORS, rule)


def times_of(call: Callable[[], object], runs: int) -> str:
    """Return milliseconds of processor time of a call, the least and the median."""
    seconds = []
    for _ in range(runs):
        began = time.thread_time()
        call()
        seconds.append(time.thread_time() - began)
    return f"{min(seconds) * 1e3:.2f}, {median(seconds) * 1e3:.2f}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if step_kernels() is None or layout_kernels() is None:
        parser.exit(2, "Quire was installed without compiled code\n")
    print("| sequences | tokens | in common | prompt | lay out: compiled | loops | plan: compiled | loops |")
    print("|---|---|---|---|---|---|---|---|")
    for step in STEPS:
        builder, items = make_step(*step)
        found = [times_of(partial(builder.lay_out, items), given.runs)]
        with patch("quire.execution.step.batch.layout_kernels", return_value=None):
            found.append(times_of(partial(builder.lay_out, items), given.runs))
        (batch,) = builder.lay_out(items).groups
        assert isinstance(batch, AttentionBatch)
        found += [times_of(partial(number_work, batch, cut_of(), each), given.runs) for each in (step_kernels(), None)]
        print("|", " | ".join([*map(str, step), *found]), "|")


if __name__ == "__main__":
    main()
