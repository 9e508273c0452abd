"""The bytes that all cache groups share, and each group's view of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class KVStorage:
    """The keys and values of one cache group.

    A block holds all layers contiguously, so that copy-on-write, swap and disk move one range of bytes. The memory is
    not touched here: a page costs nothing before a token is stored in it, and unwritten slots hold anything.

    Args:
        num_blocks: B, the null block (id 0) included.
        num_layers: L, layers of the group.
        block_size: N, tokens of a block.
        num_kv_heads: K.
        head_dim: D.
        memory: bytes to lie in, from the first on: what the groups of an arena share. None takes memory of its own.

    Attributes:
        data: [B, L, 2, K, N, D].
        block_rows: see `quire.ops.interface.PagedKV`.
        slot_rows: see `quire.ops.interface.PagedKV`.
    """

    __slots__ = ("block_rows", "data", "slot_rows")

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        memory: Tensor | None = None,
    ) -> None:
        shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        num_bytes = math.prod(shape) * dtype.itemsize
        if memory is None:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.data = memory[:num_bytes].view(dtype).view(shape)
        rows = self.data.view(-1, block_size * head_dim)
        slots = self.data.view(-1, head_dim)
        # A layer is an offset: with it in the view, the row ids of a step serve all layers.
        layer_rows = 2 * num_kv_heads
        self.block_rows: tuple[Tensor, ...] = tuple(rows[layer * layer_rows :] for layer in range(num_layers))
        self.slot_rows: tuple[Tensor, ...] = tuple(
            slots[layer * layer_rows * block_size :] for layer in range(num_layers)
        )
