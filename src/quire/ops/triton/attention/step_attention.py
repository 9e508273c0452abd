"""Paged attention of a step by Triton kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.interface.ops import AttentionBatch, HeadNorms, PagedKV, Rotation
from quire.ops.triton.attention.shared_prefixes import SharingRule
from quire.ops.triton.attention.step_numbers import StepCut, number_work, step_kernels
from quire.ops.triton.kernels import attention, heads, shared_attention
from quire.ops.triton.launches import Device
from quire.ops.triton.tiles import Tile, decode_tile, power_of_2, prefill_tile, shared_tile

# Numbers of the cache's storage formats in kernels (kernels/numbers.py).
STORED = {torch.int8: 1, torch.float8_e4m3fn: 2}
# Heads per program of `prepare_heads`.
HEADS = 8
# Elements of partial results that a program of `combine` loads at once; more for few rows, which have many splits.
COMBINED = 1024
COMBINED_OF_FEW = 4096
FEW_ROWS = 8


class PlacedShared(NamedTuple):
    """The work items of shared tokens on the device; see kernels/shared_attention.py.

    Args:
        tile: tile of a program.
        items: int32, the items.
        rows: int32, rows of the items.
        num_items: int32, the number of items.
        num_programs: number of programs per KV head.
    """

    tile: Tile
    items: Tensor
    rows: Tensor
    num_items: Tensor
    num_programs: int


class PlacedItems(NamedTuple):
    """The work items of one launch on the device; see kernels/attention.py.

    Args:
        tile: tile of a program.
        numbers: int32, the items.
        num_items: number of items, or an upper bound.
        num_places: number of partial results, or an upper bound; 0 if no context is split.
        split_rows: int32, entries of rows whose contexts are split.
        num_split: number of those entries, or an upper bound.
        counts: int32, the numbers of items and of split entries, if they are known on the device only; None if the
            numbers above are exact.
        shared: items of shared tokens, whose partial results `combine` adds; None without sharing.
    """

    tile: Tile
    numbers: Tensor
    num_items: int
    num_places: int
    split_rows: Tensor
    num_split: int
    counts: Tensor | None
    shared: PlacedShared | None = None


class TritonStepAttention:
    """Attention of one step over one cache group.

    Sequences with few rows (decodes) run with a small tile, and with split KV if their contexts are long; others
    (prefills) run in the same kernel with a large tile.
    """

    def __init__(self, batch: AttentionBatch, kv: PagedKV, device: Device) -> None:
        self._batch, self._device = batch, device
        self._head_dim, self._dtype = kv.head_dim, kv.dtype
        self._num_kv_heads, self._block_size, self._width = kv.data.shape[3:]
        self._stored = STORED.get(kv.data.dtype, 0)
        self._data = kv.data.view(torch.uint8) if kv.data.dtype == torch.float8_e4m3fn else kv.data
        self._scales = kv.data.view(torch.float32) if kv.data.dtype == torch.int8 else self._data
        self._stride_block, self._stride_head = self._data.stride(0), self._data.stride(3)
        self._placed: dict[int, list[PlacedItems]] = {}  # by the number of query heads in a group
        self._slots: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}  # by layer
        self._constants: dict[tuple[int, Tile], dict[str, int]] = {}

    def prepare(self, layer_idx: int, qkv: Tensor, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
        """Norm heads, apply RoPE to queries and keys, store keys and values; return the queries [T, H, D]."""
        num_heads = qkv.shape[1] // self._head_dim - 2 * self._num_kv_heads
        return self._prepare(layer_idx, qkv, num_heads, self._num_kv_heads, norms, rotation)

    def prepare_queries(self, q: Tensor, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
        """Norm queries and apply RoPE to them; return them as [T, H, D]."""
        return self._prepare(0, q, q.shape[1] // self._head_dim, 0, norms, rotation)

    def _prepare(
        self, layer_idx: int, qkv: Tensor, num_queries: int, num_kv: int, norms: HeadNorms | None, rotation: Rotation
    ) -> Tensor:
        num_rows = qkv.shape[0]
        queries = qkv.new_empty(num_rows, num_queries, self._head_dim)
        num_heads = num_queries + 2 * num_kv
        per_program = min(HEADS, power_of_2(num_heads))
        if num_rows == 0:
            return queries
        heads.prepare_heads[num_rows, -(-num_heads // per_program)](
            queries,
            qkv,
            rotation.cos,
            rotation.sin,
            qkv if norms is None else norms.scales,
            self._batch.slot_mapping,
            *self._slots_of(layer_idx),
            0.0 if norms is None else norms.eps,
            self._stride_block,
            self._stride_head,
            NUM_QUERIES=num_queries,
            NUM_KV=num_kv,
            NUM_NORMED=0 if norms is None else norms.scales.shape[0],
            HEAD_DIM=self._head_dim,
            DIM=power_of_2(self._head_dim, 16),
            HEADS=per_program,
            BLOCK_SIZE=self._block_size,
            WIDTH=self._width,
            STORED=self._stored,
            num_warps=4,
            **self._device.overlapping,
        )
        return queries

    def attend(
        self, layer_idx: int, q: Tensor, scale: float, sinks: Tensor | None = None, soft_cap: float | None = None
    ) -> Tensor:
        """Compute causal attention of rows [T, H, D] over their sequences; return [T, H * D]."""
        output = q.new_empty(len(q), q.shape[1] * q.shape[2])
        self.attend_into(output, layer_idx, q, scale, sinks, soft_cap)
        return output

    def attend_into(
        self, output: Tensor, layer_idx: int, q: Tensor, scale: float, sinks: Tensor | None, soft_cap: float | None
    ) -> None:
        """Write the result of `attend` to `output`."""
        num_rows, num_heads, head_dim = q.shape
        group = num_heads // self._num_kv_heads
        q = q if q.stride(2) == 1 else q.contiguous()
        if scale <= 0.0:  # kernels take the maximum of unscaled scores
            q, scale = q * scale, 1.0
        for items in self._launches(group, num_rows):
            partial = output, output
            if items.num_places:
                shape = (items.num_places, self._num_kv_heads, group)
                dim = power_of_2(head_dim, 16)
                partial = (
                    torch.empty(*shape, dim, dtype=torch.float32, device=q.device),
                    torch.empty(*shape, 2, dtype=torch.float32, device=q.device),
                )
            if items.shared is not None:
                self._launch_shared(layer_idx, q, scale, soft_cap, partial, items.shared)
            self._launch(layer_idx, q, scale, soft_cap, sinks, output, partial, items)
            if items.num_split:
                self._combine(items, output, partial, sinks, group)

    def _launches(self, group: int, num_rows: int) -> Iterator[PlacedItems]:  # noqa: ARG002 - static steps have sizes
        """Yield the items of each kind, for layers with `group` query heads per KV head."""
        if group not in self._placed:
            self._placed[group] = self._place(group)
        yield from self._placed[group]

    def _launch(
        self,
        layer_idx: int,
        q: Tensor,
        scale: float,
        soft_cap: float | None,
        sinks: Tensor | None,
        output: Tensor,
        partial: tuple[Tensor, Tensor],
        items: PlacedItems,
    ) -> None:
        """Launch attention of one kind of items."""
        batch, counts = self._batch, items.counts
        attention.attend[items.num_items, self._num_kv_heads](
            output,
            *partial,
            q,
            *self._slots_of(layer_idx),
            batch.block_ids,
            items.numbers,
            items.numbers if counts is None else counts,
            output if sinks is None else sinks,
            q.stride(0),
            q.stride(1),
            self._stride_block,
            self._stride_head,
            scale * math.log2(math.e),
            soft_cap or 0.0,
            batch.window or 0,
            batch.chunk or 0,
            **self._constants_of(q.shape[1] // self._num_kv_heads, items.tile),
            WINDOW=batch.window is not None,
            CHUNK=batch.chunk is not None,
            CAPPED=soft_cap is not None,
            SINKS=sinks is not None,
            SPLIT=items.num_places > 0,
            COUNTED=counts is not None,
            # With a soft cap, the compiler would wait for each matmul instruction (WGMMA) before the next.
            PIPELINED=items.tile.is_pipelined and self._stored == 0 and soft_cap is None,
            **self._device.overlapping,
        )

    def _launch_shared(
        self,
        layer_idx: int,
        q: Tensor,
        scale: float,
        soft_cap: float | None,
        partial: tuple[Tensor, Tensor],
        shared: PlacedShared,
    ) -> None:
        """Launch attention of rows of several sequences over their shared tokens."""
        shared_attention.attend_shared[shared.num_programs, self._num_kv_heads](
            *partial,
            q,
            *self._slots_of(layer_idx),
            self._batch.block_ids,
            shared.items,
            shared.rows,
            shared.num_items,
            q.stride(0),
            q.stride(1),
            self._stride_block,
            self._stride_head,
            scale * math.log2(math.e),
            soft_cap or 0.0,
            **self._constants_of(q.shape[1] // self._num_kv_heads, shared.tile),
            CAPPED=soft_cap is not None,
        )

    def _slots_of(self, layer_idx: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return keys and values of a layer, [B, K, N, W], and, for int8, float32 views of them for the scales."""
        slots = self._slots.get(layer_idx)
        if slots is None:
            keys, values = self._data.select(1, layer_idx).unbind(1)
            key_scales, value_scales = keys, values
            if self._scales is not self._data:
                key_scales, value_scales = self._scales.select(1, layer_idx).unbind(1)
            slots = self._slots[layer_idx] = keys, values, key_scales, value_scales
        return slots

    def _constants_of(self, group: int, tile: Tile) -> dict[str, int]:
        """Return the constexprs and options of attention kernels, for `group` query heads per KV head."""
        constants = self._constants.get((group, tile))
        if constants is None:
            constants = self._constants[group, tile] = {
                "NUM_KV": self._num_kv_heads,
                "GROUP": group,
                "HEAD_DIM": self._head_dim,
                "DIM": power_of_2(self._head_dim, 16),
                "BLOCK_SIZE": self._block_size,
                "WIDTH": self._width,
                "ROWS": tile.rows,
                "TOKENS": tile.tokens,
                "STORED": self._stored,
                "num_warps": tile.num_warps,
                "num_stages": tile.num_stages,
            }
        return constants

    def _combine(
        self, items: PlacedItems, output: Tensor, partial: tuple[Tensor, Tensor], sinks: Tensor | None, group: int
    ) -> None:
        """Launch the kernel that combines the partial results of split rows."""
        combined = COMBINED_OF_FEW if items.num_split <= FEW_ROWS else COMBINED
        attention.combine[items.num_split, self._num_kv_heads, group](
            output,
            *partial,
            items.split_rows,
            items.split_rows if items.counts is None else items.counts,
            output if sinks is None else sinks,
            NUM_KV=self._num_kv_heads,
            GROUP=group,
            HEAD_DIM=self._head_dim,
            DIM=power_of_2(self._head_dim, 16),
            PARTS=max(1, combined // power_of_2(self._head_dim, 16)),
            SINKS=sinks is not None,
            COUNTED=items.counts is not None,
            num_warps=4,
            **self._device.overlapping,
        )

    def tiles(self, group: int) -> tuple[Tile, Tile]:
        """Return the tiles for sequences with few rows and for others, for `group` query heads per KV head."""
        element_bytes = self._dtype.itemsize
        is_int8 = self._data.dtype == torch.int8
        decode = decode_tile(self._head_dim, group, element_bytes, self._stored != 0)
        return decode, prefill_tile(self._head_dim, group, element_bytes, self._device.capability, is_int8)

    def sharing_rule(self, group: int) -> SharingRule:
        """Return the rule by which shared tokens are read once, for `group` query heads per KV head."""
        is_int8 = self._data.dtype == torch.int8
        tile = shared_tile(self._head_dim, group, self._dtype.itemsize, self._device.capability, is_int8)
        return SharingRule.of(
            tile,
            self.tiles(group)[0],
            group,
            self._block_size,
            2 * self._width * self._data.itemsize,
            power_of_2(self._head_dim, 16),
            self._device.launch_bytes / self._num_kv_heads,
        )

    def _place(self, group: int) -> list[PlacedItems]:
        """Plan the work items for layers with `group` query heads per KV head, and copy them to the device."""
        decode, prefill = self.tiles(group)
        rule = self.sharing_rule(group)
        cut = StepCut(group, decode, prefill, self._num_kv_heads, self._device.num_processors, rule)
        work = number_work(self._batch, cut, step_kernels())
        few, parts, many, split_rows, shared_items, shared_rows, count = work.sections(
            self._device.placed(work.numbers)
        )
        shared = None
        if work.num_shared_items:
            shared = PlacedShared(rule.tile, shared_items, shared_rows, count, work.num_shared_items)
        placed = (
            PlacedItems(decode, few, work.num_few, 0, split_rows, 0, None),
            PlacedItems(decode, parts, work.num_parts, work.num_places, split_rows, work.num_split, None, shared),
            PlacedItems(prefill, many, work.num_many, 0, split_rows, 0, None),
        )
        return [items for items in placed if items.num_items]
