"""Speed of recurrences alone: decodes, and prompts in chunks and row by row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.correctness import StatesMemory
from benchmarks.gpu.timing import Bench
from quire.ops.interface.ops import StateBatch
from quire.ops.interface.recurrent_weights import SSMHeads
from quire.ops.triton.step_states import TritonStepStates
from quire.ops.triton.triton_ops import TritonOps

# Rows of each sequence of a step.
STEPS: Final = ((1,) * 64, (32,), (64,), (2048,), (8192,), (1024,) * 8)


class HeadShape(NamedTuple):
    """Recurrent heads of a layer: states of [dim, width], `share` heads to a group of keys."""

    num_heads: int
    dim: int
    width: int
    share: int


# Granite 4 hybrids of 1B, and Qwen3.5.
SCANNED: Final = HeadShape(48, 64, 128, 48)
CORRECTED: Final = HeadShape(32, 128, 128, 2)
REHEARSED: Final = HeadShape(2, 16, 16, 2)


def measure_states(bench: Bench, ops: TritonOps) -> None:
    """Measure one layer of each kind; prompts both ways, to find the number of rows from which chunks are faster."""
    single_rows = ops.device.single_rows
    for rows in STEPS if not bench.is_rehearsal else ((1,), (40,)):
        ways = {"row by row": max(rows)} | ({"in chunks": 1} if max(rows) > 1 else {})
        for way, limit in ways.items():
            if bench.left_s() < 60:
                return
            ops.device.single_rows = limit
            for kind, (shape, make) in {"Mamba 2": (SCANNED, scan), "delta rule": (CORRECTED, correct)}.items():
                run = make(bench, ops, rows, REHEARSED if bench.is_rehearsal else shape)
                seconds = bench.device_seconds(lambda _idx, run=run: run(), calls=4, repeats=5)  # type: ignore[misc]
                bench.add(f"{kind}, {len(rows)} x {rows[0]} rows, {way}", us=seconds * 1e6)
            ops.device.single_rows = single_rows


def make_step(bench: Bench, ops: TritonOps, rows: Sequence[int], shape: HeadShape) -> TritonStepStates:
    """Return a step of sequences that have states."""
    count = len(rows)
    states = torch.randn(count + 1, shape.num_heads, shape.dim, shape.width, device=bench.device)
    batch = StateBatch(range(1, count + 1), list(accumulate(rows, initial=0)), [True] * count)
    return TritonStepStates(batch, StatesMemory([], [states]), ops.device)


def scan(bench: Bench, ops: TritonOps, rows: Sequence[int], shape: HeadShape) -> partial[Tensor]:
    """Return a scan of Mamba 2."""
    step, num_rows, heads = make_step(bench, ops, rows, shape), sum(rows), shape.num_heads
    random = partial(torch.randn, device=bench.device)
    parameters = SSMHeads(-random(heads).exp(), random(heads), random(heads))
    widths = (heads * shape.dim, heads // shape.share * shape.width, heads // shape.share * shape.width, heads)
    x, writes, reads, dt = (random(num_rows, width, dtype=torch.bfloat16) for width in widths)
    return partial(step.ssm_scan, 0, x, writes, reads, dt, parameters)


def correct(bench: Bench, ops: TritonOps, rows: Sequence[int], shape: HeadShape) -> partial[Tensor]:
    """Return a gated delta rule."""
    step, num_rows, heads = make_step(bench, ops, rows, shape), sum(rows), shape.num_heads
    random = partial(torch.randn, num_rows, device=bench.device)
    keys = torch.nn.functional.normalize(random(heads // shape.share, shape.dim), dim=-1).flatten(1)
    values = random(heads * shape.width, dtype=torch.bfloat16)
    return partial(step.gated_delta_rule, 0, keys, keys, values, -random(heads).abs(), random(heads).sigmoid())
