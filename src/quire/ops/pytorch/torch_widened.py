"""Attention over KV caches in a storage dtype (int8, fp8): the blocks of each layer are widened to float32 first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from quire.ops.interface.ops import LEAST_SCALED, AttentionBatch, HeadNorms, PagedKV, Rotation
from quire.ops.pytorch.torch_attention import Scratch, TorchStepAttention, prepare_heads, prepare_queries

# Storage dtypes of `PagedKV` that are widened.
WIDENED: Final = frozenset({torch.int8, torch.float8_e4m3fn})


class WideKV(NamedTuple):
    """The blocks of a step in one layer, in float32; a `PagedKV`."""

    data: Tensor
    block_rows: Sequence[Tensor]
    slot_rows: Sequence[Tensor]
    head_dim: int
    dtype: torch.dtype


class WidenedStepAttention:
    """Attention of one step over one cache group.

    The blocks that the step reads are converted to float32, layer by layer, and attention runs over these copies as
    over a plain cache. This is slower than a plain cache and takes memory for the blocks of one layer; it is for
    devices without a kernel for the dtype.
    """

    def __init__(self, batch: AttentionBatch, kv: PagedKV, scratch: Scratch) -> None:
        self._data = kv.data
        self._head_dim = kv.head_dim
        num_kv_heads, block_size = kv.data.shape[3:5]
        self._blocks = torch.div(batch.slot_mapping, block_size, rounding_mode="floor")
        self._offsets = batch.slot_mapping % block_size
        self._read_ids = batch.block_ids
        num_blocks = len(batch.block_ids)
        data = kv.data.new_empty(num_blocks, 1, 2, num_kv_heads, block_size, self._head_dim, dtype=torch.float32)
        rows = data.view(-1, block_size * self._head_dim), data.view(-1, self._head_dim)
        self._wide = WideKV(data, rows[:1], rows[1:], self._head_dim, kv.dtype)
        ids = torch.arange(num_blocks, device=data.device)
        # Nothing is written to the copy: new keys and values are read from the blocks.
        self._step = TorchStepAttention(replace(batch, block_ids=ids), self._wide, scratch)

    def prepare(self, layer_idx: int, qkv: Tensor, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
        """Normalise heads, rotate queries and keys (RoPE), write keys and values; return the queries [T, H, D]."""
        heads = qkv.view(len(qkv), -1, self._head_dim)
        q, k, v = prepare_heads(heads, self._data.shape[3], norms, rotation)
        slots = as_bytes(narrowed(torch.stack((k, v), 1), self._data.dtype))
        as_bytes(self._data)[self._blocks, layer_idx, :, :, self._offsets] = slots
        return q

    def prepare_queries(self, q: Tensor, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
        """Normalise and rotate queries; return them as [T, H, D]."""
        return prepare_queries(q.view(len(q), -1, self._head_dim), norms, rotation)

    def attend(
        self, layer_idx: int, q: Tensor, scale: float, sinks: Tensor | None = None, soft_cap: float | None = None
    ) -> Tensor:
        """Compute causal attention of rows [T, H, D] over their sequences; return [T, H * D]."""
        slots = as_bytes(self._data)[self._read_ids, layer_idx].view(self._data.dtype)
        self._wide.data[:, 0] = widened(slots, self._head_dim)
        return self._step.attend(0, q, scale, sinks, soft_cap)


def narrowed(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return vectors [..., D] in the storage format of slots, [..., W]."""
    wide = vectors.float()
    if dtype == torch.float8_e4m3fn:
        most = torch.finfo(dtype).max
        return wide.clamp(-most, most).to(dtype)
    reach = wide.abs().amax(-1, keepdim=True)
    # A GPU divides by a host scalar by multiplying with its reciprocal, which may be off by one bit.
    scales = (reach / torch.full_like(reach, 127.0)).masked_fill_(reach <= LEAST_SCALED, 0.0)
    numbers = (wide / scales.masked_fill(scales == 0.0, 1.0)).round_().nan_to_num_(0.0).to(torch.int8)
    return torch.cat((numbers, scales.view(torch.int8)), -1)


def widened(slots: Tensor, head_dim: int) -> Tensor:
    """Return the vectors in slots [..., W] as float32 [..., D]."""
    if slots.dtype == torch.float8_e4m3fn:
        return slots.float()
    return slots[..., :head_dim] * slots[..., head_dim:].contiguous().view(torch.float32)


def as_bytes(slots: Tensor) -> Tensor:
    """Return elements of one byte as uint8, since no torch operator moves elements of all dtypes."""
    return slots.view(torch.uint8)
