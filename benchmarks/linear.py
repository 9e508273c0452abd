"""Linear layers in each format of weights, layer by layer, in turns: `python -m benchmarks.linear`.

Every call reads another copy of a weight, 256 MB of them in bfloat16 before the first comes again, so that they come
from memory as they do in a model. Where plain and lossless weights are compared, their results are too, bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from quire.config import Quantization
from quire.ops.cpu.native_library import NativeLibrary, runnable_libraries
from quire.ops.cpu.native_ops import NativeOps
from quire.ops.interface.ops import Linear
from quire.platform.malloc import keep_freed_memory, use_huge_pages

# In and out: what the layers of Qwen3-0.6B multiply by, and its head.
SHAPES = "1024x4096,2048x1024,1024x6144,3072x1024,1024x151936"
ROWS = "1,2,4,8,16,64,512"
FORMATS = "plain,lossless,int8,int6,int4"
# Bits of a weight, without scales and tables.
BITS = {"plain": 16.0, "lossless": 12.08, "int8": 8.5, "int8 of 16": 9.0, "int6": 6.5, "int4": 4.5}
LEAST_BYTES = 256_000_000
# Quantisation, least bits and largest group that give a format.
ROUNDED: dict[str, tuple[Quantization, int, int]] = {
    "int8 of 16": ("int8", 8, 16),
    "int8": ("int8", 8, 32),
    "int6": ("int4", 6, 32),
    "int4": ("int4", 4, 32),
}


def packer(library: NativeLibrary, name: str) -> tuple[NativeOps, dict[str, Any]]:
    """Return the backend that packs weights in a format, and the options to ask it for."""
    if name != "lossless":
        quantization, min_bits, max_group = ROUNDED.get(name, (None, 4, 32))
        return NativeOps(library, quantization), {"min_bits": min_bits, "max_group": max_group}
    assert library.lossless is not None, f"level {library.level} has no lossless weights"
    return NativeOps(library, is_lossless=True), {}


def compare(linears: dict[str, list[Linear]], x: Tensor, runs: int, num_values: int) -> str:
    """Let the formats take turns on some rows; return a line of their medians.

    Args:
        linears: the copies of a weight, for each format.
        x: [rows, width].
        runs: turns of each format.
        num_values: number of values of one weight.
    """

    def each(layers: Sequence[Linear]) -> list[Tensor]:
        return [layer(x) for layer in layers]

    results = {name: each(layers)[0] for name, layers in linears.items()}
    if {"plain", "lossless"} <= results.keys():
        assert torch.equal(*(results[name].view(torch.int16) for name in ("plain", "lossless")))
    times: dict[str, list[float]] = {name: [] for name in linears}
    for _ in range(runs):
        for name, layers in linears.items():
            started = time.perf_counter()
            each(layers)
            times[name].append((time.perf_counter() - started) / len(layers))
    first = next(iter(times.values()))
    told = []
    for name, taken in times.items():
        median_s = statistics.median(taken)
        gb_s, gop_s = num_values * BITS[name] / 8e9 / median_s, 2e-9 * num_values * len(x) / median_s
        ratio = statistics.median(a / b for a, b in zip(first, taken, strict=True))
        told.append(f"{name} {1e6 * median_s:.0f} us, {gb_s:.1f} GB/s, {gop_s:.0f} Gop/s, {ratio:.2f}x")
    return " | ".join(told)


def main() -> None:
    """Pack, measure and print."""
    libraries = runnable_libraries()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--shapes", default=SHAPES, help="in x out, separated by commas")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--formats", default=FORMATS, help="the ratios are to the first")
    parser.add_argument("--level", choices=libraries, default=list(libraries)[-1], help="instruction set")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    use_huge_pages()
    keep_freed_memory()
    probe = machine.MachineProbe(options.threads)
    library = NativeLibrary(options.level, libraries[options.level])
    for shape in options.shapes.split(","):
        width, num_columns = map(int, shape.split("x"))
        weight = (
            torch.empty(num_columns, width).normal_(generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
        )
        count = -(-LEAST_BYTES // weight.nbytes)
        linears: dict[str, list[Linear]] = {}
        for name in options.formats.split(","):
            ops, more = packer(library, name)
            started = time.perf_counter()
            linears[name] = [ops.pack_linear(weight, **more) for _ in range(count)]
            pack_s = time.perf_counter() - started
            print(f"{shape}, {name}: packed {count * weight.numel() / pack_s / 1e6:.0f} M values/s, {ops.name}")
        for num_rows in map(int, options.rows.split(",")):
            x = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(1)).bfloat16()
            before = probe.read_gb_s()
            with torch.inference_mode():
                told = compare(linears, x, options.runs, weight.numel())
            print(f"{shape}, {num_rows:3} rows: {told}, probes {before} and {probe.read_gb_s()} GB/s", flush=True)


if __name__ == "__main__":
    main()
