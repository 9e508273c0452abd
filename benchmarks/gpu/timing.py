"""Timing on a device, and the benchmark's time budget."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.shapes import Ceilings


class Bench:
    """The state that the parts of the benchmark share.

    Args:
        device: the GPU; the CPU for a rehearsal.
        limit_s: seconds after which no further figure is begun.

    Attributes:
        device, is_rehearsal: the device, and whether it is the CPU.
        rates: measured ceilings.
        figures: all figures so far, by name.
    """

    def __init__(self, device: torch.device, limit_s: float) -> None:
        self.device, self.is_rehearsal = device, device.type == "cpu"
        self._end = time.monotonic() + limit_s
        self.rates = Ceilings("rehearsal", 1.0, 1.0)
        self.figures: dict[str, dict[str, Any]] = {}

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return self._end - time.monotonic()

    def add(self, name: str, **values: Any) -> None:
        """Keep a figure, and print it."""
        self.figures[name] = values
        shown = ", ".join(f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}"
                          for key, value in values.items())  # fmt: skip
        print(f"{name:<56} {shown}", flush=True)

    def seconds(self, run: Callable[[int], object], repeats: int = 20) -> float:
        """Return the median time of a call, which gets its index, so that calls can use different memory in turn."""
        if self.is_rehearsal:
            started = time.perf_counter()
            run(0)
            return time.perf_counter() - started
        for idx in range(3):
            run(idx)
        events = [(_event(), _event()) for _ in range(repeats)]
        torch.cuda.synchronize()
        for idx, (start, end) in enumerate(events):
            start.record()
            run(idx)
            end.record()
        torch.cuda.synchronize()
        return float(statistics.median(start.elapsed_time(end) for start, end in events)) / 1e3

    def device_seconds(self, run: Callable[[int], object], calls: int = 16, repeats: int = 10) -> float:
        """Return the median time of a call on the device alone.

        Calls of other numbers are captured one after the other, since to launch a small one takes longer than it runs.
        """
        if self.is_rehearsal:
            return self.seconds(run)
        for idx in range(calls):
            run(idx)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for idx in range(calls):
                run(idx)
        return self.seconds(lambda _idx: graph.replay(), repeats) / calls

    def memory_left(self) -> int:
        """Return the bytes that may still be allocated on the device."""
        return 1 << 26 if self.is_rehearsal else int(torch.cuda.mem_get_info(self.device)[0] * 0.9)


def measure_ceilings(bench: Bench) -> None:
    """Measure the bandwidth of a copy and the throughput of a dense matmul."""
    size, width = (1 << 20, 128) if bench.is_rehearsal else (1 << 30, 8192)
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    moved = 2 * size / bench.seconds(lambda _: target.copy_(source))
    a = torch.randn(width, width, device=bench.device, dtype=torch.bfloat16)
    computed = 2 * width**3 / bench.seconds(lambda _: a @ a)
    name = "rehearsal" if bench.is_rehearsal else torch.cuda.get_device_name(bench.device)
    bench.rates = Ceilings(name, moved, computed)
    bench.add("ceilings", gb_per_s=moved / 1e9, tflops=computed / 1e12)
    if not bench.is_rehearsal:
        host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
        part = source[: 1 << 28]
        for label, to, given in (("host to device", part, host), ("device to host", host, part)):
            seconds = bench.seconds(partial(_copy, to, given), repeats=5)
            bench.add(f"pinned copies, {label}", gb_per_s=(1 << 28) / seconds / 1e9)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _copy(target: Tensor, source: Tensor, _idx: int) -> None:
    target.copy_(source, non_blocking=True)
