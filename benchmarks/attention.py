"""Native attention over paged KV, beside the bandwidth of reading memory: `python -m benchmarks.attention`.

A step is timed through the door that models use, one layer after the other, so that a layer's keys and values come from
memory as they do in a model. Blocks lie in a random order. Three kinds of steps:

- decode: one row a sequence, by KV dtype, context and batch;
- shared: sequences whose tables begin with the same blocks, in turns with as many that have blocks of their own;
- prompts: chunks of a prompt, some after a history.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch

from benchmarks import machine
from quire.execution.step.kv_storage import STORED, KVStorage
from quire.ops.cpu.native_library import NativeLibrary, runnable_libraries
from quire.ops.cpu.native_ops import NativeOps
from quire.ops.interface.ops import AttentionBatch, Ops
from quire.ops.pytorch.torch_widened import WIDENED, narrowed
from quire.platform.malloc import keep_freed_memory, use_huge_pages

LEAST_BYTES = 256_000_000  # that a round over the layers reads, where the cache may be as large
MOST_LAYERS = 28
DECODE_CONTEXTS = "128,512,2048,4096,16384"
DECODE_BATCHES = "1,4,16,64"


class Heads(NamedTuple):
    """Query heads, KV heads, values of a head, tokens of a block."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


class Step(NamedTuple):
    """A step of sequences with equal lengths.

    Args:
        num_seqs: number of sequences.
        history: number of cached tokens of each sequence.
        num_rows: number of rows of each sequence in this step.
        num_shared: number of cached tokens whose blocks all sequences share.
    """

    num_seqs: int
    history: int
    num_rows: int = 1
    num_shared: int = 0

    @property
    def context(self) -> int:
        """Tokens that a last row sees."""
        return self.history + self.num_rows

    @property
    def num_stored(self) -> int:
        """Tokens of all sequences, shared ones once."""
        return self.num_shared + self.num_seqs * (self.context - self.num_shared)

    @property
    def num_seen(self) -> int:
        """Tokens that all rows see, added up."""
        return self.num_seqs * (self.num_rows * self.history + self.num_rows * (self.num_rows + 1) // 2)


class AttentionCase:
    """A step over a cache of its own, ready to run.

    Attributes:
        num_layers: that a round goes through.
        layer_bytes: that a layer must read, shared blocks once.
    """

    def __init__(self, ops: Ops, heads: Heads, step: Step, stored: str, dtype: torch.dtype) -> None:
        num_heads, num_kv_heads, head_dim, block_size = heads
        num_shared = step.num_shared // block_size
        own = -(-step.context // block_size) - num_shared
        num_blocks = num_shared + step.num_seqs * own
        slot_bytes = KVStorage(1, 1, 1, 1, head_dim, dtype, "cpu", stored=stored).data.nbytes
        self.layer_bytes = step.num_stored * num_kv_heads * slot_bytes
        self.num_layers = max(1, min(MOST_LAYERS, LEAST_BYTES // self.layer_bytes))
        kv = KVStorage(num_blocks, self.num_layers, block_size, num_kv_heads, head_dim, dtype, "cpu", stored=stored)
        seeds = torch.Generator().manual_seed(0)
        vectors = torch.randn(2, num_kv_heads, block_size, head_dim, generator=seeds).to(dtype)
        kv.data.copy_(narrowed(vectors, kv.data.dtype) if kv.data.dtype in WIDENED else vectors.to(kv.data.dtype))
        ids = torch.randperm(num_blocks, generator=seeds)
        tables = [
            torch.cat((ids[:num_shared], ids[num_shared + seq * own : num_shared + (seq + 1) * own]))
            for seq in range(step.num_seqs)
        ]
        self._q = torch.randn(step.num_seqs * step.num_rows, num_heads, head_dim, generator=seeds).to(dtype)
        self._ops, self._kv, self._scale = ops, kv, head_dim**-0.5
        self._batch = AttentionBatch(
            torch.zeros(len(self._q), dtype=torch.int64),
            [seq * step.num_rows for seq in range(step.num_seqs + 1)],
            [step.context] * step.num_seqs,
            torch.cat(tables),
            list(accumulate((len(table) for table in tables), initial=0)),
        )

    def seconds(self) -> float:
        """Run all layers once; return the seconds of one, its share of what is prepared once a step included."""
        started = time.perf_counter()
        attention = self._ops.step_attention(self._batch, self._kv)
        for layer in range(self.num_layers):
            attention.attend(layer, self._q, self._scale)
        return (time.perf_counter() - started) / self.num_layers


def timed(cases: list[AttentionCase], runs: int) -> list[float]:
    """Return the median seconds of a layer of each case; they take turns."""
    for case in cases:
        case.seconds()
    times = [[case.seconds() for case in cases] for _ in range(runs)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def decode(
    make: Callable[[Step, str], AttentionCase], options: argparse.Namespace, probe: machine.MachineProbe
) -> None:
    """Time one row a sequence by dtype, context and batch."""
    for stored in options.kv.split(","):
        for context in map(int, options.contexts.split(",")):
            print(f"probe {probe.read_gb_s()} GB/s")
            for batch in map(int, options.batches.split(",")):
                step = Step(batch, context - 1)
                if step.num_stored > options.max_tokens:
                    continue
                case = make(step, stored)
                (layer_s,) = timed([case], options.runs)
                print(
                    f"decode {stored:8} context {context:5} batch {batch:2}: {1e6 * layer_s:9.1f} us a layer, "
                    f"{case.layer_bytes / layer_s / 1e9:5.1f} GB/s",
                    flush=True,
                )


def shared(
    make: Callable[[Step, str], AttentionCase], options: argparse.Namespace, probe: machine.MachineProbe
) -> None:
    """Time a shared prefix in turns with as many unshared tokens."""
    print(f"probe {probe.read_gb_s()} GB/s")
    for stored in options.kv.split(","):
        for num_seqs, num_shared, own, num_rows in (
            *((16, 512, 48, 1), (4, 512, 48, 1), (16, 512, 0, 32)),
            *((16, 300, 48, 1), (64, 2048, 100, 1), (8, 4096, 100, 3)),
        ):
            steps = [Step(num_seqs, num_shared + own, num_rows, count) for count in (num_shared, 0)]
            together, apart = timed([make(step, stored) for step in steps], options.runs)
            print(
                f"shared {stored:8} {num_seqs:2} sequences share {num_shared:4} tokens, {own:3} of their own, "
                f"{num_rows:2} rows: {1e6 * together:8.1f} us a layer, not shared {1e6 * apart:8.1f}: "
                f"{apart / together:.2f}x",
                flush=True,
            )


def prompts(
    make: Callable[[Step, str], AttentionCase], options: argparse.Namespace, probe: machine.MachineProbe
) -> None:
    """Time chunks of prompts."""
    for stored in options.kv.split(","):
        for step in (Step(1, 0, 512), Step(1, 3584, 512), Step(1, 2048, 2048), Step(8, 0, 64)):
            case = make(step, stored)
            (layer_s,) = timed([case], options.runs)
            num_heads, _, head_dim, _ = options.heads
            gflop = 4e-9 * step.num_seen * num_heads * head_dim
            print(
                f"prompts {stored:8} {step.num_seqs} x {step.num_rows:4} rows behind {step.history:4} tokens: "
                f"{1e3 * layer_s:7.2f} ms a layer, {gflop / layer_s:6.0f} GFLOP/s, of registers alone "
                f"{probe.gflop_s()}",
                flush=True,
            )


KINDS = {"decode": decode, "shared": shared, "prompts": prompts}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=list(KINDS), metavar="kind", help=", ".join(KINDS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--dtype", default="bfloat16", help="of the model")
    parser.add_argument("--kv", default="bfloat16,int8", help=f"dtypes of slots, of {', '.join(STORED)}")
    parser.add_argument("--heads", default="16,8,128,16", help="query heads, KV heads, head dim, block size")
    parser.add_argument("--contexts", default=DECODE_CONTEXTS, help="of decode")
    parser.add_argument("--batches", default=DECODE_BATCHES, help="of decode")
    parser.add_argument("--max-tokens", type=int, default=262_144, help="that decode stores at most")
    parser.add_argument("--level", help="the instruction set; else the best that was built")
    parser.add_argument("--deterministic", action="store_true", help="the same bits for a row in every batch")
    options = parser.parse_args()
    options.heads = Heads(*map(int, options.heads.split(",")))
    torch.set_num_threads(options.threads)
    use_huge_pages()
    keep_freed_memory()
    libraries = runnable_libraries()
    level = options.level or list(libraries)[-1]
    ops = NativeOps(NativeLibrary(level, libraries[level]), deterministic=options.deterministic)
    dtype = getattr(torch, options.dtype)
    probe = machine.MachineProbe(options.threads)
    print(f"{ops.name}, {options.threads} threads, {options.dtype}, {options.heads}")

    def make(step: Step, stored: str) -> AttentionCase:
        # Values of the model's dtype are stored unchanged.
        return AttentionCase(ops, options.heads, step, stored, dtype)

    with torch.inference_mode():
        for kind in options.kinds:
            KINDS[kind](make, options, probe)


if __name__ == "__main__":
    main()
