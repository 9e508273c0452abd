"""Host time to plan the attention of captured decode steps: `python -m benchmarks.captured_plans`; needs no GPU.

Sequences of some 8,300 tokens decode step by step; before each step the host lays their block tables out in static
buffers, finds what they share, and writes the work of attention beside. What is timed is that, for one cache group;
what is written is not copied anywhere. The GPU that the work is cut for has 132 processors. The processor time of the
thread that does it is beside the time on the clock, which other work on the machine changes.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from itertools import count
from statistics import median
from typing import Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.memory import BLOCK_SIZE, make_memory
from quire.execution.capture.laid_tables import LaidTables
from quire.execution.step.batch import BlockTable
from quire.memory.results import TableDelta
from quire.ops.interface.static_steps import StaticLimits, StaticMemory
from quire.ops.triton.attention.static_attention import TritonStaticAttention, TritonStaticTokens
from quire.ops.triton.launches import LAUNCH_BYTES
from quire.ops.triton.triton_ops import TritonOps

SHARED: Final = 8192
PROCESSORS: Final = 132
# Query heads to a KV head, KV heads, and dimensions: those of Llama-3.1-8B.
GROUP, KV_HEADS, HEAD_DIM = 4, 8, 128


class DecodeStep(NamedTuple):
    """A step of decodes.

    Args:
        positions: int64 [n], position of each row.
        tables: block table of each.
        num_blocks: blocks of each up to its position.
    """

    positions: Tensor
    tables: Sequence[BlockTable]
    num_blocks: Sequence[int]


class DecodingSequences:
    """Sequences that decode.

    Args:
        num_sequences: number of sequences.
        num_prompts: number of prompts that these begin with, alike in the first quarter; 0 for nothing in common.
        life: steps until a sequence ends, and another one takes its place; 0 for no end.
    """

    def __init__(self, num_sequences: int, num_prompts: int, life: int) -> None:
        self._rng, self._ids, self._life = random.Random(1), count(1), life
        num_blocks = SHARED // BLOCK_SIZE
        common = self._take(num_blocks // 4)
        self._prompts = [[*common, *self._take(num_blocks - len(common))] for _ in range(num_prompts)]
        self._tables: list[BlockTable] = []
        self._contexts: list[int] = []
        for _ in range(num_sequences):
            self._join()
        # They are at different places in their lives.
        self._left = [self._rng.randrange(1, life) if life else 0 for _ in range(num_sequences)]

    def steps(self, number: int) -> Iterator[DecodeStep]:
        """Yield steps, each a token later."""
        for _ in range(number):
            num_blocks = [len(table.ids) for table in self._tables]
            yield DecodeStep(torch.tensor(self._contexts) - 1, list(self._tables), num_blocks)
            self._decode()

    def _decode(self) -> None:
        for seq in reversed(range(len(self._tables))):
            self._left[seq] -= 1
            if self._life and self._left[seq] <= 0:
                del self._tables[seq], self._contexts[seq], self._left[seq]
                self._join()
                self._left.append(self._life)
            self._contexts[seq] += 1
            table = self._tables[seq]
            if self._contexts[seq] > BLOCK_SIZE * len(table.ids):
                table.change(TableDelta(0, len(table.ids), (next(self._ids),)))

    def _join(self) -> None:
        context, table = SHARED + self._rng.randrange(70, 186), BlockTable()
        ids = list(self._rng.choice(self._prompts)) if self._prompts else self._take(SHARED // BLOCK_SIZE)
        table.change(TableDelta(0, 0, (*ids, *self._take(-(-context // BLOCK_SIZE) - len(ids)))))
        self._tables.append(table)
        self._contexts.append(context)

    def _take(self, number: int) -> list[int]:
        return [next(self._ids) for _ in range(number)]


def make_buffers(num_sequences: int) -> TritonStaticTokens:
    """Make the static buffers of a cache group, as for a captured step on a GPU."""
    ops = TritonOps(torch.device("cpu"))
    ops.device.num_processors, ops.device.launch_bytes = PROCESSORS, LAUNCH_BYTES
    kv = make_memory(2, 1, KV_HEADS, HEAD_DIM, torch.device("cpu"))
    limits = StaticLimits(num_sequences, num_sequences * (2 * SHARED // BLOCK_SIZE))
    static = ops.static_tokens(kv, None, None, StaticMemory(torch.device("cpu")), limits)
    assert static is not None
    nothing = torch.zeros(0, dtype=torch.int64)
    static.write_tokens(nothing, torch.zeros(1, dtype=torch.int64), nothing, num_sequences)
    attention = TritonStaticAttention(static.batch(num_sequences, shares=True), kv, ops.device)
    static.launch(GROUP, num_sequences, attention.tiles(GROUP)[0], attention.sharing_rule(GROUP), shares=True)
    return static


class Times(NamedTuple):
    """Milliseconds of a step.

    Args:
        clock: time that passed.
        thread: processor time of the thread.
    """

    clock: float
    thread: float


def measure(num_sequences: int, num_prompts: int, life: int, num_steps: int) -> list[Times]:
    """Return the times of each step, after a fifth of them that are not measured."""
    static, times = make_buffers(num_sequences), []
    laid = LaidTables(static.block_ids, BLOCK_SIZE)
    for step in DecodingSequences(num_sequences, num_prompts, life).steps(num_steps):
        began, began_thread = time.perf_counter(), time.thread_time()
        tables = laid.lay(step.tables, step.positions.tolist())
        shares = static.share(step.positions, *tables)
        static.write_tokens(step.positions, tables.block_ids, tables.block_starts, num_sequences, shares)
        thread = time.thread_time() - began_thread
        times.append(Times((time.perf_counter() - began) * 1e3, thread * 1e3))
        assert shares == (num_prompts > 0)
    return times[num_steps // 5 :]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="steps of each kind of traffic")
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256], help="numbers of sequences")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| sequences | prompts | one ends after | processor, ms: least | median | 90 of 100 | clock: median |")
    print("|---|---|---|---|---|---|---|")
    for num_sequences in args.sequences:
        # Without an end, after 500 steps, and so that one ends in every step.
        for num_prompts, life in ((0, 0), (1, 0), (8, 0), (1, 500), (1, num_sequences), (8, num_sequences)):
            times = measure(num_sequences, num_prompts, life, args.steps)
            thread = sorted(each.thread for each in times)
            of_ten = thread[len(thread) * 9 // 10]
            columns = thread[0], median(thread), of_ten, median(each.clock for each in times)
            ends = f"{life} steps" if life else "never"
            print(f"| {num_sequences} | {num_prompts} | {ends} | {' | '.join(f'{each:.2f}' for each in columns)} |")


if __name__ == "__main__":
    main()
