"""Replayed attention against eager attention: one capture serves other contexts."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.memory import make_batch, make_memory, num_blocks_of
from quire.execution.capture.captured_steps import capture_on
from quire.ops.interface.static_steps import StaticLimits, StaticMemory
from quire.ops.triton.triton_ops import TritonOps

# Context lengths of the replayed step; the captured step has padding rows only.
CONTEXTS = (700, 15, 1, 3000, 33)
# Repetitions of these five contexts where they share a prefix, so that more than one tile has rows.
SHARED_TIMES = 4


def captured_attention_error(
    ops: TritonOps,
    device: torch.device,
    window: int | None = None,
    chunk: int | None = None,
    head_dim: int = 128,
    shared: int = 0,
) -> float:
    """Return the largest difference between replayed and eager decodes.

    All contexts share a prefix of `shared` tokens, which the captured step must read once.
    """
    spans = [(context - 1 + shared, 1) for context in CONTEXTS] * (SHARED_TIMES if shared else 1)
    num_rows, group = 8 * -(-len(spans) // 8), 4
    kv = make_memory(num_blocks_of(spans), 2, 2, head_dim, device)
    batch = make_batch(spans, device, window=window, chunk=chunk, shared=shared)
    q = torch.randn(num_rows, 2 * group, head_dim, device=device).to(kv.dtype)
    expected = ops.step_attention(batch, kv).attend(1, q[: len(spans)], 0.1)
    memory = StaticMemory(device)
    static = ops.static_tokens(kv, window, chunk, memory, StaticLimits(num_rows, 1 + len(batch.block_ids)))
    assert static is not None, "a cache of 16 bits has static steps"
    nothing = torch.zeros(0, dtype=torch.int64)
    static.write_tokens(nothing, torch.zeros(1, dtype=torch.int64), nothing, num_rows)
    memory.upload()
    out = torch.zeros(num_rows, 2 * group * head_dim, device=device, dtype=kv.dtype)

    def attend() -> None:
        out.copy_(ops.step_attention(static.batch(num_rows, shared > 0), kv).attend(1, q, 0.1))

    call = capture_on(device).capture(attend)
    positions = torch.tensor([history for history, _ in spans])
    ids: Tensor = torch.cat((batch.block_ids.cpu(), torch.zeros(1, dtype=torch.int64)))
    starts = torch.tensor(batch.block_starts[:-1])
    if static.share(positions, ids, starts, range(len(starts))) != (shared > 0):
        return float("inf")
    static.write_tokens(positions, ids, starts, num_rows, shared > 0)
    memory.upload()
    call.replay()
    return float((out[: len(spans)].float() - expected.float()).abs().max())
