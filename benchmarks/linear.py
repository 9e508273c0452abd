"""Lossless packed weights beside plain ones, layer by layer, in turns: `python -m benchmarks.linear`.

Every call reads another weight, 256 MB of them before the first comes again, so that they come from memory as they do
in a model. The results are compared bit for bit, too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks import machine
from quire.execution.heap import keep_freed_memory, use_huge_pages
from quire.ops import make_ops
from quire.ops.interface import Linear

# In and out: what the layers of Qwen3-0.6B multiply by, and its head.
SHAPES = ((1024, 4096), (3072, 1024), (1024, 151936))
ROWS = (1, 2, 4, 16, 64)
LEAST_BYTES = 256_000_000


def weights(width: int, num_columns: int) -> list[Tensor]:
    """Return as many random normal weights as the bytes take."""
    count = -(-LEAST_BYTES // (2 * width * num_columns))
    seeds = torch.Generator().manual_seed(0)
    return [torch.randn(num_columns, width, generator=seeds).mul_(0.02).bfloat16() for _ in range(count)]


def compare(linears: dict[str, list[Linear]], x: Tensor, runs: int) -> str:
    """Let the packings take turns on some rows; return their medians and the ratio, over all pairs of turns."""

    def each(layers: Sequence[Linear]) -> list[Tensor]:
        return [layer(x) for layer in layers]

    results = [each(layers)[0].view(torch.int16) for layers in linears.values()]
    assert torch.equal(*results)
    times: dict[str, list[float]] = {name: [] for name in linears}
    for _ in range(runs):
        for name, layers in linears.items():
            started = time.perf_counter()
            each(layers)
            times[name].append((time.perf_counter() - started) / len(layers))
    plain, lossless = (statistics.median(times[name]) for name in ("plain", "lossless"))
    ratios = sorted(a / b for a, b in zip(times["plain"], times["lossless"], strict=True))
    return (
        f"{1e6 * plain:8.0f} us plain, {1e6 * lossless:8.0f} us lossless: {statistics.median(ratios):.2f}x "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )


def main() -> None:
    """Pack, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    use_huge_pages()
    keep_freed_memory()
    probe = machine.Probe(options.threads)
    for width, num_columns in SHAPES:
        plain = weights(width, num_columns)
        linears: dict[str, list[Linear]] = {}
        for name in ("plain", "lossless"):
            ops = make_ops(torch.device("cpu"), "native", weight_packing=name)
            started = time.perf_counter()
            linears[name] = [ops.pack_linear(weight) for weight in plain]
            pack_s = time.perf_counter() - started
            num_values = len(plain) * width * num_columns
            print(f"{width} x {num_columns}: packed {num_values / pack_s / 1e6:.0f} M values/s, {ops.name}")
        for num_rows in ROWS:
            x = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(1)).bfloat16()
            with torch.inference_mode():
                told = compare(linears, x, options.runs)
            print(f"{width} x {num_columns}, {num_rows:3} rows: {told}, probe {probe.read_gb_s()} GB/s", flush=True)


if __name__ == "__main__":
    main()
