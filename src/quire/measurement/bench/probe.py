"""A short probe of this machine with the engine's threads: rates of memory reads and of matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from quire.measurement.bench.roofline import Rates
from quire.ops.interface.ops import Ops
from quire.platform.host_probe import probe

# Larger than any cache; reduced if the machine has little memory available.
READ_BYTES = 256 << 20
# Rows, inputs and outputs of the product; the large one is skipped if it would take longer than `TOO_SLOW_S`.
SMALL_PRODUCT = (16, 1024, 2048)
LARGE_PRODUCT = {"cpu": (512, 1024, 2048), "cuda": (8192, 8192, 8192)}
TOO_SLOW_S = 0.05
BUDGET_S = 0.1
MIN_RUNS, MAX_RUNS = 3, 100


class ProbedRates(NamedTuple):
    """Rates that were measured by a probe.

    Args:
        read_bytes_per_s: rate of memory reads.
        float32_operations_per_s: rate of torch's float32 products.
        own_operations_per_s: rate of products of the engine's kernels in the model's dtype.
    """

    read_bytes_per_s: float
    float32_operations_per_s: float
    own_operations_per_s: float

    @property
    def rates(self) -> Rates:
        """The rates for a lower bound, with the faster of the two products."""
        return Rates(self.read_bytes_per_s, max(self.float32_operations_per_s, self.own_operations_per_s))


@torch.inference_mode()
def measure_rates(device: str, dtype: torch.dtype, ops: Ops) -> ProbedRates:
    """Return the best rates of short runs that read memory and multiply matrices."""
    torch_device = torch.device(device)
    num_values = min(READ_BYTES, probe(device).available_bytes // 4) // 4
    values = torch.ones(max(num_values, 1), device=torch_device)
    read_s = _best_s(values.sum, torch_device)
    num_bytes = values.numel() * values.element_size()
    del values
    float32, model_dtype = (_product_rate(torch_device, kind, ops) for kind in (None, dtype))
    return ProbedRates(num_bytes / read_s, float32, model_dtype)


def _product_rate(device: torch.device, dtype: torch.dtype | None, ops: Ops) -> float:
    """Return operations per second of the engine's kernels in `dtype`; of torch in float32 if it is None."""
    best = 0.0
    for num_rows, num_inputs, num_outputs in (SMALL_PRODUCT, LARGE_PRODUCT[device.type]):
        operations = 2 * num_rows * num_inputs * num_outputs
        if best and operations / best > TOO_SLOW_S:
            break
        x = torch.ones(num_rows, num_inputs, device=device)
        weight = torch.ones(num_outputs, num_inputs, device=device)
        if dtype is None:
            product_s = _best_s(partial(torch.mm, x, weight.T), device)
        else:
            product_s = _best_s(partial(ops.pack_linear(weight.to(dtype)), x.to(dtype)), device)
        best = max(best, operations / product_s)
    return best


def _best_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of the runs that fit into `BUDGET_S`, after one untimed run."""
    times: list[float] = []
    run()
    while len(times) < MIN_RUNS or (sum(times) < BUDGET_S and len(times) < MAX_RUNS):
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished its work; a CPU has none pending."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
