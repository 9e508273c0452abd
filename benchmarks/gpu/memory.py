"""A paged cache and batches over it, made without an engine: this needs torch and Triton only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.interface.ops import AttentionBatch, Rotation

BLOCK_SIZE = 16


class KVMemory(NamedTuple):
    """Keys and values of some layers; a `PagedKV`."""

    data: Tensor
    head_dim: int
    dtype: torch.dtype

    @property
    def block_rows(self) -> Sequence[Tensor]:
        """A view for each layer."""
        rows = self.data.view(-1, self.data.shape[4] * self.data.shape[5])
        return [rows[layer * 2 * self.data.shape[3] :] for layer in range(self.data.shape[1])]

    @property
    def slot_rows(self) -> Sequence[Tensor]:
        """A view for each layer."""
        rows, count = self.data.view(-1, self.data.shape[5]), 2 * self.data.shape[3] * self.data.shape[4]
        return [rows[layer * count :] for layer in range(self.data.shape[1])]


def make_memory(
    num_blocks: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
    stored: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.bfloat16,
) -> KVMemory:
    """Make a cache of random bytes that are finite values in every dtype."""
    width = head_dim + (4 if stored == torch.int8 else 0)
    shape = num_blocks, num_layers, 2, num_kv_heads, BLOCK_SIZE, width * stored.itemsize
    # Exponents in the middle of each format: 0x3C and 0x3D.
    data = torch.randint(60, 62, shape, dtype=torch.uint8, device=device)
    return KVMemory(data.view(stored), head_dim, dtype)


def make_batch(
    spans: Sequence[tuple[int, int]],
    device: torch.device,
    first_block: int = 1,
    window: int | None = None,
    chunk: int | None = None,
    shared: int = 0,
) -> AttentionBatch:
    """Lay sequences out, each with its history and its rows, on shuffled blocks from `first_block` on.

    The first `shared` tokens of all histories, whole blocks, are in the blocks of the first sequence.
    """
    counts = [-(-(history + rows) // BLOCK_SIZE) for history, rows in spans]
    generator = torch.Generator().manual_seed(1)
    ids = first_block + torch.randperm(sum(counts), generator=generator)
    starts = list(accumulate(counts, initial=0))
    for start in starts[1:-1]:
        ids[start : start + shared // BLOCK_SIZE] = ids[: shared // BLOCK_SIZE]
    slots = []
    for (history, rows), start in zip(spans, starts, strict=False):
        positions = torch.arange(history, history + rows)
        slots.append(ids[start + positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)
    return AttentionBatch(
        torch.cat(slots).to(device),
        list(accumulate((rows for _, rows in spans), initial=0)),
        [history + rows for history, rows in spans],
        ids.to(device),
        starts,
        window,
        chunk,
        ids,
    )


def num_blocks_of(spans: Sequence[tuple[int, int]]) -> int:
    """Return the number of blocks of sequences, the null block included."""
    return 1 + sum(-(-(history + rows) // BLOCK_SIZE) for history, rows in spans)


def make_rotation(num_rows: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Rotation:
    """Make random angles."""
    angles = torch.randn(num_rows, 1, head_dim // 2, generator=torch.Generator().manual_seed(2))
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    return Rotation(angles.cos().repeat(1, 1, 2).to(device, dtype), sin.to(device, dtype))
