"""Attention of a step by native kernels."""

from __future__ import annotations

from array import array
from ctypes import addressof, byref
from typing import Any

import torch
from torch import Tensor

from quire.ops.cpu.native_library import MAX_HEAD_DIM, TYPES, NativeLibrary
from quire.ops.cpu.native_structures import Cache, StepRows
from quire.ops.interface.ops import AttentionBatch, HeadNorms, PagedKV, Rotation


def reads_cache(kv: PagedKV) -> bool:
    """Return whether the kernels support a cache: head sizes are even and at most 256, and dtypes are limited."""
    return kv.head_dim <= MAX_HEAD_DIM and kv.head_dim % 2 == 0 and kv.data.dtype in (kv.dtype, torch.int8)


class AttentionPlan:
    """The jobs of a step's attention, for all layers with the same number of query heads per KV head."""

    __slots__ = ("_free", "_tokens_read", "handle")

    def __init__(
        self, library: NativeLibrary, rows: Any, cache: Any, group: int, batch: AttentionBatch, deterministic: bool
    ) -> None:
        self._free, self._tokens_read = library.free_attention_plan, library.tokens_read
        sight = batch.window or 0, batch.chunk or 0
        self.handle = library.plan_attention(rows, cache, group, *sight, deterministic)

    def __del__(self) -> None:
        self._free(self.handle)

    @property
    def tokens_read(self) -> int:
        """Number of tokens whose keys and values each KV head reads in a layer, counted once per read."""
        return int(self._tokens_read(self.handle))


class NativeStepAttention:
    """Attention of one step over one cache group, read directly through its block tables.

    A shared prefix is read once for as many rows as fit into a job, however the block tables branch.
    """

    def __init__(self, library: NativeLibrary, batch: AttentionBatch, kv: PagedKV, deterministic: bool = False) -> None:
        self._num_kv_heads, block_size = kv.data.shape[3:5]
        self._head_dim = kv.head_dim
        self._library = library
        self._is_deterministic = deterministic
        self._plans: dict[int, AttentionPlan] = {}
        self._num_rows = batch.row_starts[-1]
        # The pointers below point into these arrays and tensors.
        numbers = [array("q", part) for part in (batch.row_starts, batch.context_lens, batch.block_starts)]
        self.batch, self._numbers, self._kv = batch, numbers, kv
        starts = [part.buffer_info()[0] for part in numbers]
        tables = batch.block_ids.data_ptr(), batch.slot_mapping.data_ptr()
        self._step_rows = StepRows(len(batch.context_lens), *starts, *tables)
        self._rows = byref(self._step_rows)
        strides = [kv.data.stride(dim) * kv.data.itemsize for dim in (0, 1, 4)]
        data = (kv.data.data_ptr(), TYPES[kv.dtype], kv.data.dtype == torch.int8, *strides)
        self._kv_cache = Cache(*data, self._num_kv_heads, block_size, self._head_dim)
        self._cache = byref(self._kv_cache)

    def pointers(self, num_heads: int) -> tuple[int, int, int]:
        """Return the addresses of rows, cache and plan, for layers with `num_heads` query heads."""
        return addressof(self._step_rows), addressof(self._kv_cache), self.plan(num_heads).handle

    def prepare(self, layer_idx: int, qkv: Tensor, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
        """Normalise heads, rotate queries and keys (RoPE), write keys and values; return the queries [T, H, D]."""
        num_heads = qkv.shape[1] // self._head_dim - 2 * self._num_kv_heads
        return self._prepare(self._cache, layer_idx, qkv, num_heads, norms, rotation)

    def prepare_queries(self, q: Tensor, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
        """Normalise and rotate queries; return them as [T, H, D]."""
        no_cache = Cache.from_buffer_copy(self._kv_cache)
        no_cache.num_kv_heads = 0  # nothing is stored
        return self._prepare(byref(no_cache), 0, q, q.shape[1] // self._head_dim, norms, rotation)

    def _prepare(
        self, cache: Any, layer_idx: int, heads: Tensor, num_heads: int, norms: HeadNorms | None, rotation: Rotation
    ) -> Tensor:
        queries = heads.new_empty(self._num_rows, num_heads, self._head_dim)
        scale_type, scales, num_normed, eps = TYPES[heads.dtype], None, 0, 0.0
        if norms is not None:
            scale_type, scales, num_normed = TYPES[norms.scales.dtype], norms.scales.data_ptr(), len(norms.scales)
            eps = norms.eps
        self._library.prepare(
            self._rows,
            cache,
            layer_idx,
            heads.data_ptr(),
            scale_type,
            scales,
            num_normed,
            eps,
            rotation.cos.data_ptr(),
            rotation.sin.data_ptr(),
            num_heads,
            queries.data_ptr(),
        )
        return queries

    def attend(
        self, layer_idx: int, q: Tensor, scale: float, sinks: Tensor | None = None, soft_cap: float | None = None
    ) -> Tensor:
        """Compute causal attention of rows [T, H, D] over their sequences; return [T, H * D]."""
        num_rows, num_heads, head_dim = q.shape
        output = q.new_empty(num_rows, num_heads * head_dim)
        handle = self.plan(num_heads).handle
        queries, scores = (q.data_ptr(), q.stride(0)), (scale, soft_cap or 0.0)
        pointers = None if sinks is None else sinks.data_ptr(), output.data_ptr()
        self._library.attend(self._rows, self._cache, handle, layer_idx, *queries, *scores, *pointers)
        return output

    def plan(self, num_heads: int) -> AttentionPlan:
        """Return the plan of layers with `num_heads` query heads."""
        group = num_heads // self._num_kv_heads
        plan = self._plans.get(group)
        if plan is None:
            plan = AttentionPlan(self._library, self._rows, self._cache, group, self.batch, self._is_deterministic)
            self._plans[group] = plan
        return plan
