"""Calls of the host in a step with a prompt: `TRITON_INTERPRET=1 python -m benchmarks.step_launches`; needs no GPU.

Counted are launches of kernels, operators of torch that compute, allocations, and replays of captured pieces, of a step
that is launched kernel by kernel and of one that is replayed in pieces; and of a pass of Qwen3.5's MTP head, which is
replayed by one call. They depend on the layers alone, so the models are narrow.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.captured import open_items
from benchmarks.gpu.memory import BLOCK_SIZE, make_memory, num_blocks_of
from benchmarks.gpu.shapes import REHEARSED
from benchmarks.gpu.speed import load_random, make_decoder
from benchmarks.gpu.timing import Bench
from quire.execution.capture.captured_steps import CaptureOptions, capture_steps
from quire.execution.capture.step_capture import CapturedCall
from quire.execution.capture.tape_capture import UNWRITTEN, _again
from quire.execution.step.batch import BatchBuilder
from quire.execution.step.kv_storage import make_storages
from quire.models.capacity.draft_compat import mtp_spec
from quire.models.families import build
from quire.models.modules.decoder import Decoder
from quire.models.modules.mtp import MTPHead
from quire.ops.triton.interpreted_launches import seen_launches
from quire.ops.triton.triton_ops import TritonOps
from tests.models.mtp import save_mtp_checkpoint

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


def make_head(bench: Bench) -> MTPHead:
    """Make an MTP head of random weights on the device."""
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((save_mtp_checkpoint(Path(folder), 0.0, 0.0) / "config.json").read_text())
    spec, _ = build(config)
    target = Decoder(spec, ops=TritonOps(bench.device), dtype=torch.bfloat16, device=bench.device)
    load_random(target, bench)
    head = MTPHead(target, mtp_spec("a made-up model", spec))
    load_random(head, bench)
    return head


def count_pass(head: MTPHead, num_rows: int) -> dict[str, int]:
    """Return what a pass of a head launches; laying it out and planning it are left out, as for steps."""
    spans = [(CONTEXT - 1, 1)] * num_rows
    num_blocks = num_blocks_of(spans)
    groups = head.cache_groups[:-1]
    (kv,) = make_storages(groups, [num_blocks], BLOCK_SIZE, head.dtype, head.device)
    builder = BatchBuilder(BLOCK_SIZE, head.device, [group.cache for group in groups])
    batch = builder.lay_out(open_items(builder, spans, num_blocks))
    hidden = torch.zeros(num_rows, head.spec.width, dtype=head.dtype)

    def run() -> Tensor:
        return head.predict(head.run(batch.input_ids, batch.positions, batch.groups, [kv], hidden))

    return count(run)


@torch.inference_mode()
def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--decodes", type=int, nargs="+", default=[0, 4], help="decodes beside the prompt")
    given = parser.parse_args()
    device = torch.device("cpu")
    shape = REHEARSED._replace(num_layers=given.layers, is_qwen3=True)
    bench = Bench(device, 0.0)
    decoder = make_decoder(shape, bench, TritonOps(device))
    for decodes in given.decodes:
        spans = [(CONTEXT - 1, 1)] * decodes + [(0, PROMPT)]
        num_blocks = num_blocks_of(spans)
        memory = make_memory(num_blocks, shape.num_layers, shape.num_kv_heads, shape.head_dim, device)
        builder = BatchBuilder(BLOCK_SIZE, device, [group.cache for group in decoder.cache_groups])
        batch = builder.lay_out(open_items(builder, spans, num_blocks))
        options = CaptureOptions((), CONTEXT + PROMPT, (decodes + PROMPT,))
        steps = capture_steps(decoder, [memory], [num_blocks], BLOCK_SIZE, options)  # type: ignore[list-item]
        pieces = None if steps is None else steps.pieces
        assert pieces is not None, "nothing in a dense model waits"
        (step,) = pieces._steps
        pieces._steps = [step._replace(pieces=[CapturedCall(lambda: None)] * len(step.pieces))]
        launched = count(partial(decoder, batch.input_ids, batch.positions, batch.groups, [memory]))
        replayed = count(partial(pieces.run, batch))
        print(f"a prompt and {decodes} decodes, launched: {launched}, {sum(launched.values())} calls")
        replayed["replays"] = len(step.pieces)
        print(f"a prompt and {decodes} decodes, in pieces: {replayed}, {sum(replayed.values())} calls")
    head = make_head(bench)
    for num_rows in (1, 4):
        launched = count_pass(head, num_rows)
        print(f"a pass of an MTP head, {num_rows} rows, launched: {launched}, {sum(launched.values())} calls")


if __name__ == "__main__":
    main()
