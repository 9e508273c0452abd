"""LoRA adapters of linear layers: their results against the reference implementation, and their time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from benchmarks.gpu.shapes import LLAMA_8B, REHEARSED
from benchmarks.gpu.timing import Bench
from quire.ops.interface.lora import LoraLayer, LoraPart, LoraRows, LoraWeight, TorchLoraLayer
from quire.ops.interface.weight_memory import WeightMemory
from quire.ops.triton.triton_ops import TritonOps

RANK: Final = 16
# Adapters of each step's sequences, and rows of each sequence.
STEPS: Final = (((0,), 1), (tuple(idx % 16 for idx in range(64)), 1), (tuple(range(64)) * 4, 1), ((0,), 2048))


def make_weight(num_columns: int, width: int, seed: int, dtype: torch.dtype, device: torch.device) -> LoraWeight:
    """Return an adapter of two modules, like gate and up; the ranks are 16, and for odd seeds 16 and 11."""
    generator = torch.Generator().manual_seed(seed)
    half, ranks = num_columns // 2, (RANK, RANK - seed % 2 * 5)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(columns**-0.5).to(device, dtype)

    parts = (LoraPart(matrix(half, ranks[0]), 0, 0), LoraPart(matrix(half, ranks[1]), ranks[0], half))
    return LoraWeight(matrix(sum(ranks), width), parts)


def fill(layer: LoraLayer, weights: Sequence[LoraWeight]) -> LoraLayer:
    """Put an adapter into each slot."""
    for slot, weight in enumerate(weights):
        layer.put(slot, layer.pack(weight, WeightMemory(1)))
    return layer


def adapters_error(ops: TritonOps, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest error, for decodes and prompts with several adapters, relative to the largest magnitude."""
    num_columns, width, cpu = 520, 1100, torch.device("cpu")
    layers = [
        fill(layer, [make_weight(num_columns, width, seed, dtype, place) for seed in range(3)])
        for layer, place in ((ops.make_lora(num_columns), device), (TorchLoraLayer(num_columns), cpu))
    ]
    errors = []
    for slots, counts in (([0, None, 2, 1, 2] * 9, [1] * 45), ([1, 0, None, 2], [70, 1, 9, 130])):
        generator = torch.Generator().manual_seed(1)
        x, residual = (torch.randn(sum(counts), size, generator=generator).to(dtype) for size in (width, num_columns))
        found, expected = (
            layer(x.to(place), LoraRows.of(slots, counts), residual.to(place)).float().cpu()  # type: ignore[arg-type]
            for layer, place in zip(layers, (device, cpu), strict=True)
        )
        errors.append(((found - expected).abs().max() / expected.abs().max()).item())
    return max(errors)


def measure_adapters(bench: Bench, ops: TritonOps) -> None:
    """Measure the time of adapters of gate and up, and of the linear layer itself."""
    shape = REHEARSED if bench.is_rehearsal else LLAMA_8B
    num_columns, width, dtype = 2 * shape.ffn_width, shape.width, torch.bfloat16
    most = 2 if bench.is_rehearsal else 64
    weights = [make_weight(num_columns, width, 2 * seed, dtype, bench.device) for seed in range(most)]
    layer = fill(ops.make_lora(num_columns), weights)
    linear = ops.pack_linear(torch.zeros(num_columns, width, dtype=dtype, device=bench.device))
    for slots, count in STEPS if not bench.is_rehearsal else (((0, 1, 1), 1),):
        if bench.left_s() < 60:
            return
        rows = LoraRows.of(slots, [count] * len(slots))
        assert rows is not None, "all sequences have an adapter"
        x = torch.randn(len(slots) * count, width, dtype=dtype, device=bench.device)
        name = f"{len(x)} rows of {len(set(slots))} adapters"
        for what, call in (
            (f"adapters, {name}", partial(layer, x, rows, None)),
            (f"their layer, {name}", partial(linear, x)),
        ):
            seconds = bench.device_seconds(partial(_run, call))
            bench.add(what, us=seconds * 1e6)


def _run(call: partial[Tensor], _idx: int) -> None:
    call()
