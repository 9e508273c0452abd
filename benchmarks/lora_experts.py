"""Time a layer of experts with adapters beside the same layer without: `python -m benchmarks.lora_experts`.

The experts of granite-4.0-h-tiny (64 of 512 columns, of which a token goes through 6, hidden states of 1536 values)
with random weights in plain bfloat16, adapters of rank 16 in all of them. Steps of 16 rows with one adapter and with
eight, and a prompt of 512 rows with one; in turns, as a machine changes between them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.machine import facts
from quire.models.modules.experts import ExpertsBlock
from quire.models.modules.norms import Norm
from quire.models.modules.projections import ResidualAdd
from quire.models.specs.spec import Experts
from quire.ops import make_ops
from quire.ops.interface.adapted_linear import StepAdapters
from quire.ops.interface.fused_layers import FusesExperts
from quire.ops.interface.lora import LoraPart, LoraRows, LoraWeight
from quire.ops.interface.weight_memory import WeightMemory

WIDTH, EXPERTS = 1536, Experts(64, 6, 512, renormalised=True)
NUM_ADAPTERS, RANK = 8, 16
CPU, DTYPE = torch.device("cpu"), torch.bfloat16
# Rows, and the number of their adapters, of each case beside the one without.
STEPS = {"decode, 16 rows": (16, (1, 8)), "prompt, 512 rows": (512, (1,))}


def make_block() -> tuple[ExpertsBlock, StepAdapters]:
    """Return a layer of experts with random weights, and with adapters in the first slots."""
    ops, step = make_ops(CPU, weight_packing="plain"), StepAdapters()
    block = ExpertsBlock(
        EXPERTS, WIDTH, ResidualAdd(), ops, partial(Norm, width=WIDTH, ops=ops, dtype=DTYPE, device=CPU)
    )
    for slot in block.slots.values():
        slot.fill((torch.randn(slot.shape) * 0.02).to(DTYPE))
    assert isinstance(ops, FusesExperts), "native kernels are measured"
    block.fuse(ops)
    memory = WeightMemory(64 << 20)
    for name, (in_width, out_width) in (
        ("gate_up", (WIDTH, 2 * EXPERTS.width)),
        ("down", (EXPERTS.width, WIDTH)),
    ):
        taker = block.slots[f"{name}.weight"].experts
        assert taker is not None
        adapters = taker.adapt(ops, step)
        for number in range(NUM_ADAPTERS):
            weights = {}
            for idx in range(EXPERTS.num_experts):
                a, b = torch.randn(RANK, in_width) * 0.02, torch.randn(out_width, RANK) * 0.02
                weights[idx] = LoraWeight(a.to(DTYPE), (LoraPart(b.to(DTYPE), 0, 0),))
            adapters.put(number, adapters.pack(weights, memory))
    block.fuse_adapted(ops)
    return block, step


def main() -> None:
    """Measure in turns, and print and store the medians and the ratios' medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    block, step = make_block()
    shown: dict[str, dict[str, float]] = {}
    for name, (num_rows, numbers) in STEPS.items():
        cases = {0: None} | {
            number: LoraRows(num_rows, {slot: [*range(slot, num_rows, number)] for slot in range(number)})
            for number in numbers
        }
        clocks = {"s": time.perf_counter, "cpu_s": time.process_time}
        spent: dict[str, dict[int, list[float]]] = {clock: {number: [] for number in cases} for clock in clocks}
        with torch.inference_mode():
            for idx in range(args.rounds + 1):
                x = torch.randn(num_rows, WIDTH).to(DTYPE)
                for number, rows in cases.items():
                    step.begin(None if rows is None else (rows, None))
                    starts = {clock: now() for clock, now in clocks.items()}
                    block(x, x)
                    for clock, now in clocks.items() if idx else ():  # the first round warms up
                        spent[clock][number].append(now() - starts[clock])
        for number in cases:
            of_case = shown[f"{name}, {number} adapters"] = {}
            for clock in clocks:
                ratios = [own / none for own, none in zip(spent[clock][number], spent[clock][0], strict=True)]
                of_case[clock] = statistics.median(spent[clock][number])
                of_case[f"{clock}_ratio"] = statistics.median(ratios)
            print(name, number, of_case, flush=True)
    print(json.dumps(shown, indent=1))
    if args.output:
        result = {"machine": facts(), "threads": args.threads, "rounds": args.rounds, "medians": shown}
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
