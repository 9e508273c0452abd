"""Calls of the host in a step with a prompt: `TRITON_INTERPRET=1 python -m benchmarks.step_launches`; needs no GPU.

Counted are launches of kernels, operators of torch that compute, allocations, and replays of captured pieces, of a step
that is launched kernel by kernel and of one that is replayed in pieces. They depend on the layers alone, so the model
is narrow.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.captured import open_items
from benchmarks.gpu.memory import BLOCK_SIZE, make_memory, num_blocks_of
from benchmarks.gpu.shapes import REHEARSED
from benchmarks.gpu.speed import make_decoder
from benchmarks.gpu.timing import Bench
from quire.execution.batch import BatchBuilder
from quire.execution.captured_steps import CaptureOptions, capture_steps
from quire.execution.step_capture import CapturedCall
from quire.execution.tape_capture import UNWRITTEN, _again
from quire.ops.triton.interpreted_launches import seen_launches
from quire.ops.triton.triton_ops import TritonOps

CONTEXT, PROMPT = 40, 20


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that compute, and allocations; views are neither."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = self.allocations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count it."""
        results = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in UNWRITTEN:
            self.allocations += 1
        elif _again(func, args, kwargs or {}, results):
            self.operators += 1
        return results


def count(run: Callable[[], object]) -> dict[str, int]:
    """Return what a call launches."""
    launches: list[object] = []
    with seen_launches(launches.append), Counting() as seen:
        run()
    return {"launches": len(launches), "operators": seen.operators, "allocations": seen.allocations}


@torch.inference_mode()
def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--decodes", type=int, nargs="+", default=[0, 4], help="decodes beside the prompt")
    given = parser.parse_args()
    device = torch.device("cpu")
    shape = REHEARSED._replace(num_layers=given.layers, is_qwen3=True)
    decoder = make_decoder(shape, Bench(device, 0.0), TritonOps(device))
    for decodes in given.decodes:
        spans = [(CONTEXT - 1, 1)] * decodes + [(0, PROMPT)]
        num_blocks = num_blocks_of(spans)
        memory = make_memory(num_blocks, shape.num_layers, shape.num_kv_heads, shape.head_dim, device)
        builder = BatchBuilder(BLOCK_SIZE, device, [group.cache for group in decoder.cache_groups])
        batch = builder.lay_out(open_items(builder, spans, num_blocks))
        options = CaptureOptions((), CONTEXT + PROMPT, (decodes + PROMPT,))
        _, pieces = capture_steps(decoder, [memory], [num_blocks], BLOCK_SIZE, options)  # type: ignore[list-item]
        assert pieces is not None, "nothing in a dense model waits"
        (step,) = pieces._steps
        pieces._steps = [step._replace(pieces=[CapturedCall(lambda: None)] * len(step.pieces))]
        launched = count(partial(decoder, batch.input_ids, batch.positions, batch.groups, [memory]))
        replayed = count(partial(pieces.run, batch))
        print(f"a prompt and {decodes} decodes, launched: {launched}, {sum(launched.values())} calls")
        replayed["replays"] = len(step.pieces)
        print(f"a prompt and {decodes} decodes, in pieces: {replayed}, {sum(replayed.values())} calls")


if __name__ == "__main__":
    main()
