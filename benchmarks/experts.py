"""Time the experts of a layer as one native call beside the same without it: `python -m benchmarks.experts`."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import get_args

import torch

from quire.config import Quantization
from quire.models.modules.experts import ExpertsBlock
from quire.models.modules.norms import Norm
from quire.models.modules.projections import ResidualAdd
from quire.models.specs.spec import Experts, RMSNorm
from quire.ops import make_ops
from quire.ops.interface.fused_layers import FusesExperts

# Hidden width, width of an expert, experts, chosen ones, width of the shared one; the third has the widths of
# Qwen3.5-35B-A3B, the last those of LFM2-8B-A1B, with fewer experts.
SHAPES = ((512, 128, 64, 8, 128), (1024, 256, 64, 8, 256), (2048, 512, 48, 8, 512), (2048, 1792, 16, 4, 0))
NUM_STEPS = 60


def make_block(shape: tuple[int, ...], quantization: Quantization | None) -> ExpertsBlock:
    """Return a block of experts with random weights, which runs as one call."""
    width, inner, num_experts, num_chosen, shared = shape
    ops = make_ops(torch.device("cpu"), "native", quantization)
    experts = Experts(num_experts, num_chosen, inner, renormalised=True, shared_width=shared, shared_gate=shared > 0)

    def new_norm(norm: RMSNorm) -> Norm:
        return Norm(norm, width, ops, torch.bfloat16, torch.device("cpu"))

    block = ExpertsBlock(experts, width, ResidualAdd(), ops, new_norm)
    for slot in block.slots.values():
        slot.fill(torch.empty(slot.shape, dtype=torch.bfloat16).normal_(0, 0.05))
    assert isinstance(ops, FusesExperts)
    block.fuse(ops)
    return block


@torch.inference_mode()
def times(block: ExpertsBlock, width: int, num_rows: int) -> tuple[list[float], list[float]]:
    """Return the seconds of steps without the call and with it, in turns."""
    fused = block.fused
    found: tuple[list[float], list[float]] = ([], [])
    residual = torch.randn(num_rows, width).bfloat16()
    for step in range(NUM_STEPS):
        x = torch.randn(num_rows, width).bfloat16()
        for which in (0, 1) if step % 2 else (1, 0):
            block.fused = fused if which else None
            start = time.perf_counter()
            block(x, residual)
            found[which].append(time.perf_counter() - start)
    block.fused = fused
    return found


def main() -> None:
    """Print a line for each shape, form of weights and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for shape in SHAPES:
        for quantization in (None, *get_args(Quantization)):
            block = make_block(shape, quantization)
            for num_rows in args.rows:
                plain, fused = times(block, shape[0], num_rows)
                medians, minima = ([1e3 * of(each) for each in (plain, fused)] for of in (statistics.median, min))
                words = [f"{a:.2f} and {b:.2f} ms ({a / b:.2f})" for a, b in (medians, minima)]
                print(f"{shape} {quantization or 'bfloat16'}, {num_rows} rows: medians {words[0]}, minima {words[1]}")


if __name__ == "__main__":
    main()
