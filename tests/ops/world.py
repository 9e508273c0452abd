"""A paged cache with sequences in it, for comparing attention with the reference."""

from __future__ import annotations

import random
from itertools import accumulate

import torch

from quire.execution.step.kv_storage import KVStorage
from quire.ops.interface.ops import AttentionBatch, HeadNorms, Ops, Rotation, StepAttention
from quire.ops.pytorch.torch_widened import WIDENED, narrowed
from quire.ops.reference.reference_ops import ReferenceOps

REFERENCE = ReferenceOps()
# What one rounding of a result near 1 may cost.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def rotation_of(num_rows: int, head_dim: int, dtype: torch.dtype, device: str = "cpu") -> Rotation:
    """Return random angles."""
    angles = randn(num_rows, 1, head_dim // 2, device=device, seed=2)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    return Rotation(angles.cos().repeat(1, 1, 2).to(dtype), sin.to(dtype))


def assert_near(found: torch.Tensor, expected: torch.Tensor, *, factor: float = 1.0) -> None:
    tolerance = factor * TOLERANCE[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


class World:
    """A storage full of NaN in which sequences on shuffled blocks have stored their histories.

    Args:
        spans: for each sequence its history and its rows of this step, in tokens.
        window: tokens that a row sees. What has left the window of all rows is NaN.
        chunk: tokens of a chunk, in which a row sees what comes before it. What no row sees is NaN.
        has_norms: query and key heads are normed.
        has_value_norms: so are value heads.
        stored: what the cache keeps them as; None as they are.
        has_sinks: heads have sinks, of next to no weight, of some, and of nearly all.
        soft_cap: soft cap of scores, which are about 1.
    """

    def __init__(
        self,
        spans: list[tuple[int, int]],
        *,
        block_size: int = 16,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        group: int = 2,
        window: int | None = None,
        chunk: int | None = None,
        has_norms: bool = False,
        has_value_norms: bool = False,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        stored: str | None = None,
        has_sinks: bool = False,
        soft_cap: float | None = None,
    ) -> None:
        num_blocks = [-(-(history + rows) // block_size) for history, rows in spans]
        ids = list(range(1, sum(num_blocks) + 3))
        random.Random(5).shuffle(ids)
        ids = ids[: sum(num_blocks)]
        block_starts = list(accumulate(num_blocks, initial=0))
        shape = (sum(num_blocks) + 3, 3, block_size, num_kv_heads, head_dim)
        self.kv = KVStorage(*shape, dtype, device, stored=stored)
        self.kv.data.view(torch.uint8).fill_(0xFF)  # NaN in every dtype, and as a scale
        new_slots = []
        for seq, (history, rows) in enumerate(spans):
            table = torch.tensor(ids[block_starts[seq] : block_starts[seq + 1]])
            positions = torch.arange(history + rows)
            blocks, offsets = table[positions // block_size], positions % block_size
            new_slots.append((blocks * block_size + offsets)[history:])
            first = 0 if window is None else max(0, history + 1 - window)
            live = slice(first if chunk is None else history - history % chunk, history)
            vectors = randn(history, 3, 2, num_kv_heads, head_dim, dtype=dtype, device=device, seed=seq)
            self._store(vectors[live], blocks[live], offsets[live])
        num_rows = sum(rows for _, rows in spans)
        host_ids = torch.tensor(ids)
        self.batch = AttentionBatch(
            torch.cat(new_slots).to(device),
            list(accumulate((rows for _, rows in spans), initial=0)),
            [history + rows for history, rows in spans],
            host_ids.to(device),
            block_starts,
            window,
            chunk,
            host_ids,
        )
        heads = (group + 2) * num_kv_heads
        self.qkv = randn(num_rows, heads * head_dim, dtype=dtype, device=device, seed=99)
        self.norms, self.sinks = None, None
        if has_norms or has_value_norms:
            num_normed = heads if has_value_norms else heads - num_kv_heads
            scales = randn(num_normed, head_dim, dtype=dtype, device=device, seed=3)
            self.norms = HeadNorms(scales, 1e-5)
        self.rotation = rotation_of(num_rows, head_dim, dtype, device)
        self.scale, self.soft_cap = head_dim**-0.5, soft_cap
        if has_sinks:
            self.sinks = randn(group * num_kv_heads, device=device, seed=4).mul_(4)
            self.sinks[::5] = 9.0

    def _store(self, vectors: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        """Store keys and values, [tokens, layers, 2, K, D], in the slots of these blocks and offsets."""
        element = self.kv.data.dtype
        slots = narrowed(vectors, element) if element in WIDENED else vectors.to(element)
        slots = slots.view(torch.uint8).reshape(*slots.shape, element.itemsize)
        data = self.kv.data.view(torch.uint8)
        data = data.view(*data.shape[:-1], slots.shape[-2], -1)
        data[blocks, :, :, :, offsets] = slots

    def run(self, ops: Ops, layer_idx: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Store and attend in one layer; return queries and outputs."""
        step = ops.step_attention(self.batch, self.kv)
        queries = step.prepare(layer_idx, self.qkv, self.norms, self.rotation)
        return queries, self.attend(step, queries, layer_idx)

    def attend(self, step: StepAttention, queries: torch.Tensor, layer_idx: int = 1) -> torch.Tensor:
        """Attend in one layer to what is stored."""
        return step.attend(layer_idx, queries, self.scale, self.sinks, self.soft_cap)

    def check(self, ops: Ops) -> None:
        """Compare the queries, the cache and the outputs of a backend with the reference's."""
        before, kept = self.kv.data.clone(), self.qkv.clone()
        queries, expected = self.run(REFERENCE)
        written = self.kv.data.clone()
        self.kv.data.copy_(before)
        found_queries, found = self.run(ops)
        assert_near(found_queries, queries, factor=2)
        tolerance = 2 * TOLERANCE[self.kv.data.dtype]
        torch.testing.assert_close(self.kv.data, written, rtol=tolerance, atol=tolerance, equal_nan=True)
        # Not near but equal: values are stored as they are, if they are not normed, and nothing else is touched.
        if self.norms is None or self.norms.scales.numel() < self.qkv.shape[1]:
            assert torch.equal(self.kv.data[:, :, 1].nan_to_num(), written[:, :, 1].nan_to_num())
        assert torch.equal(self.kv.data[:, 0].nan_to_num(), before[:, 0].nan_to_num())
        assert torch.equal(self.qkv, kept)
        assert found.is_contiguous()
        assert found.shape == expected.shape
        assert_near(found, expected, factor=2)


RAGGED = [(0, 20), (37, 1), (0, 1), (15, 1), (16, 5), (63, 2), (30, 34), (5, 1), (0, 64)]
