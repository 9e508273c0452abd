"""Paged attention by torch operators, one sequence after the other."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.interface.ops import AttentionBatch, HeadNorms, PagedKV, Rotation
from quire.ops.pytorch import torch_rows

# Query rows of a chunk that are scored at once, so that the scores of a common context stay in the CPU's cache.
TILE_ROWS = 64
# Tokens whose keys a single row scores at once, so that the keys stay in the CPU's cache.
TILE_TOKENS = 256
# Maximum number of scores in memory at once, for long contexts; 16 MiB.
TILE_SCORES = 1 << 22


class Scratch:
    """A reused destination buffer of gathers: it stays in the CPU's cache, and its pages are faulted in only once."""

    __slots__ = ("_device", "_memory")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[torch.dtype, Tensor] = {}

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return the flat buffer of a dtype, grown by doubling; its contents are lost when it grows."""
        memory = self._memory.get(dtype)
        if memory is None or len(memory) < num_elements:
            size = num_elements if memory is None else max(num_elements, 2 * len(memory))
            memory = self._memory[dtype] = torch.empty(size, dtype=dtype, device=self._device)
        return memory


class Gather(NamedTuple):
    """Some blocks of a sequence, and the destination of their gather.

    Args:
        row_ids: block rows of the layer, head by head: keys, then, for more than one query row, values.
        gathered: [row ids, N * D].
        keys: [K, tokens, D], a view of `gathered` without tokens that no row sees: the undefined tail of the last
            block, and the start of the first block if it is out of the window.
        wide_keys: destination of the keys in float32; `keys` itself if they are float32.
        values: [K, tokens, D] as `keys`, or empty for one query row.
    """

    row_ids: Tensor
    gathered: Tensor
    keys: Tensor
    wide_keys: Tensor
    values: Tensor


class Job(NamedTuple):
    """The query rows of one sequence, and the gathers of the tokens that they see: several for a single row, else one.

    Args:
        first_seen: the first token of the gather that each row sees; None if all rows see it from its start.
    """

    start: int
    end: int
    gathers: list[Gather]
    first_seen: Tensor | None


class Bags(NamedTuple):
    """The values that single rows (decodes) see, as bags of cache rows: one bag per row and query head.

    Args:
        rows: the single rows, int64.
        slots: slot rows of the layer's values, one bag after the other.
        starts: offset of each bag in `slots`.
        weights: float32, one for each slot.
        by_row: view of `weights` for each single row, as [K, G, context].
    """

    rows: Tensor
    slots: Tensor
    starts: Tensor
    weights: Tensor
    by_row: tuple[Tensor, ...]


class TorchStepAttention:
    """Attention of one step over one cache group.

    A sequence's blocks are gathered by one copy, directly into the layout that the matmul reads, and each KV head is
    read once for all query heads of its group. Values are not gathered for single rows (decodes): torch's embedding bag
    sums weighted rows of the cache itself, for all sequences in one call. Nothing is padded.
    """

    def __init__(self, batch: AttentionBatch, kv: PagedKV, scratch: Scratch) -> None:
        _, num_layers, _, num_kv_heads, block_size, head_dim = kv.data.shape
        self._slot_rows = kv.slot_rows
        self._block_rows = kv.block_rows
        self._num_kv_heads = num_kv_heads
        rows_of_block = num_layers * 2 * num_kv_heads
        heads = torch.arange(2 * num_kv_heads, device=kv.data.device)

        blocks = torch.div(batch.slot_mapping, block_size, rounding_mode="floor")
        first_slots = batch.slot_mapping + blocks * ((rows_of_block - 1) * block_size)
        slots = first_slots[:, None] + heads * block_size
        self._key_slots = slots[:, :num_kv_heads].flatten()
        self._value_slots = slots[:, num_kv_heads:].flatten()

        block_counts = [end - start for start, end in pairwise(batch.block_starts)]
        most_numbers = max(block_counts) * num_kv_heads * block_size * head_dim
        self._memory = scratch.take(2 * most_numbers, kv.data.dtype)
        self._wide_memory = scratch.take(most_numbers, torch.float32)
        block_rows = heads[:, None] + batch.block_ids * rows_of_block
        offsets = torch.arange(block_size, device=kv.data.device)
        tile_blocks = max(1, TILE_TOKENS // block_size)
        self._jobs = []
        self._seen: list[Tensor] = []  # for each single row, the slots [K, context] of the values that it sees
        spans = zip(
            pairwise(batch.row_starts), batch.context_lens, block_rows.split_with_sizes(block_counts, 1), strict=True
        )
        for (start, end), context_len, table in spans:
            # Tokens before the window or chunk of all rows are skipped.
            first_seen = batch.first_seen(context_len - (end - start))
            table = table[:, first_seen // block_size :]
            skipped = first_seen % block_size
            num_tokens = context_len - first_seen // block_size * block_size
            if end - start == 1:
                by_block = table[num_kv_heads:, :, None] * block_size + offsets
                self._seen.append(by_block.flatten(1)[:, skipped:num_tokens])
                tiles = table[:num_kv_heads].split_with_sizes(_cut(table.shape[1], tile_blocks), 1)
            else:
                tiles = (table,)
            ends = _cut(num_tokens, tile_blocks * block_size if len(tiles) > 1 else num_tokens)
            starts = [skipped, *[0] * (len(tiles) - 1)]
            gathers = [self._gather(*part) for part in zip(tiles, starts, ends, strict=True)]
            firsts = None
            if batch.first_seen(context_len - 1) > first_seen:
                positions = range(context_len - (end - start), context_len)
                firsts = torch.tensor([batch.first_seen(position) for position in positions], device=kv.data.device)
                firsts -= first_seen
            self._jobs.append(Job(start, end, gathers, firsts))
        self._bags: dict[int, Bags] = {}  # by the number of query heads in a group

    def _gather(self, row_ids: Tensor, first: int, end: int) -> Gather:
        """Lay out the gather of some block rows, [K or 2 * K, blocks], whose tokens `[first, end)` are seen."""
        block_width = self._block_rows[0].shape[1]
        head_dim = self._slot_rows[0].shape[1]
        gathered = self._memory[: row_ids.numel() * block_width].view(-1, block_width)
        tokens = gathered.view(len(row_ids), -1, head_dim)[:, first:end]
        keys, values = tokens[: self._num_kv_heads], tokens[self._num_kv_heads :]
        wide_keys = keys
        if keys.dtype != torch.float32:
            wide_keys = self._wide_memory[: keys.numel()].view(keys.shape)
        return Gather(row_ids.flatten(), gathered, keys, wide_keys, values)

    def prepare(self, layer_idx: int, qkv: Tensor, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
        """Norm heads, rotate queries and keys, store keys and values; return the queries [T, H, D]."""
        rows = self._slot_rows[layer_idx]
        q, k, v = prepare_heads(qkv.view(len(qkv), -1, rows.shape[1]), self._num_kv_heads, norms, rotation)
        rows.index_copy_(0, self._key_slots, k.flatten(0, 1).to(rows.dtype))
        rows.index_copy_(0, self._value_slots, v.flatten(0, 1).to(rows.dtype))
        return q

    def prepare_queries(self, q: Tensor, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
        """Norm and rotate queries; return them as [T, H, D]."""
        return prepare_queries(q.view(len(q), -1, self._slot_rows[0].shape[1]), norms, rotation)

    def attend(
        self, layer_idx: int, q: Tensor, scale: float, sinks: Tensor | None = None, soft_cap: float | None = None
    ) -> Tensor:
        """Compute causal attention of rows [T, H, D] over their sequences; return [T, H * D]."""
        num_rows, num_heads, head_dim = q.shape
        group = num_heads // self._num_kv_heads
        block_rows = self._block_rows[layer_idx]
        bags = self._bags.get(group) or self._make_bags(group)
        # Scores are float32, as in fused kernels: rounded to bfloat16 they would cost several times the accuracy.
        queries = (q.float() * scale).view(num_rows, self._num_kv_heads, group, head_dim)
        if sinks is not None:
            sinks = sinks.view(self._num_kv_heads, group, 1)
        weights = iter(bags.by_row)
        chunks = []
        for start, end, gathers, first_seen in self._jobs:
            scores = []
            for row_ids, gathered, keys, wide_keys, values in gathers:
                torch.index_select(block_rows, 0, row_ids, out=gathered)
                if wide_keys is not keys:
                    wide_keys.copy_(keys)
                if end - start == 1:
                    scores.append(_capped(torch.bmm(queries[start], wide_keys.mT), soft_cap))
                else:
                    rows = attend_in_tiles(queries[start:end], wide_keys, values, first_seen, sinks, soft_cap)
                    chunks.append((start, end, rows))
            if scores and sinks is None:
                torch.softmax(scores[0] if len(scores) == 1 else torch.cat(scores, 2), -1, out=next(weights))
            elif scores and sinks is not None:
                next(weights).copy_(torch.cat((*scores, sinks), 2).softmax(-1)[:, :, :-1])
        if not chunks:
            return self._sum_bags(layer_idx, bags, q.dtype).view(num_rows, -1)
        output = q.new_empty(num_rows, num_heads, head_dim)
        for start, end, rows in chunks:
            output[start:end] = rows
        if bags.by_row:
            output[bags.rows] = self._sum_bags(layer_idx, bags, q.dtype).view(-1, num_heads, head_dim)
        return output.view(num_rows, -1)

    def _sum_bags(self, layer_idx: int, bags: Bags, dtype: torch.dtype) -> Tensor:
        """Return the weighted sums of values, [single rows * H, D]."""
        values = self._slot_rows[layer_idx]
        weights = bags.weights.to(values.dtype)
        return torch.embedding_bag(values, bags.slots, bags.starts, False, 0, False, weights)[0].to(dtype)

    def _make_bags(self, group: int) -> Bags:
        """Lay out the bags for layers with `group` query heads to a KV head."""
        device = self._key_slots.device
        by_head = [seen[:, None].expand(-1, group, -1) for seen in self._seen]
        sizes = [bag.numel() for bag in by_head]
        singles = [job.start for job in self._jobs if job.end - job.start == 1]
        weights = torch.empty(sum(sizes), device=device)
        ends = torch.tensor([bag.shape[2] for bag in by_head], dtype=torch.int64, device=device)
        ends = ends.repeat_interleave(self._num_kv_heads * group).cumsum(0)
        self._bags[group] = bags = Bags(
            torch.tensor(singles, dtype=torch.int64, device=device),
            torch.cat([bag.flatten() for bag in by_head]) if by_head else ends,
            torch.cat((ends.new_zeros(1), ends[:-1])),
            weights,
            tuple(part.view(bag.shape) for part, bag in zip(weights.split_with_sizes(sizes), by_head, strict=True)),
        )
        return bags


def prepare_heads(
    heads: Tensor, num_kv_heads: int, norms: HeadNorms | None, rotation: Rotation
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm heads [T, H + 2 K, D], rotate queries and keys; return queries, keys and values."""
    if norms is not None and len(norms.scales) == heads.shape[1]:  # values too
        heads, norms = torch_rows.rms_norm(heads, *norms), None
    qk, v = heads.split_with_sizes((heads.shape[1] - num_kv_heads, num_kv_heads), 1)
    q, k = prepare_queries(qk, norms, rotation).split_with_sizes((qk.shape[1] - num_kv_heads, num_kv_heads), 1)
    return q, k, v


def prepare_queries(heads: Tensor, norms: HeadNorms | None, rotation: Rotation) -> Tensor:
    """Norm and rotate heads [T, H, D]."""
    return torch_rows.rotary(heads if norms is None else torch_rows.rms_norm(heads, *norms), *rotation)


def attend_in_tiles(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    first_seen: Tensor | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Compute attention of a sequence's last rows, some rows at a time, by plain matmuls.

    ```
     keys     |<------ seen by all rows of the tile ------>|<- diagonal ->|
     rows                                     earlier tiles |<-- tile --->| later tiles
    ```

    The matmul with the values is in bfloat16 for bfloat16 values, as in fused kernels, else in float32. On a CPU this
    takes half to three quarters of the time of torch's fused operator.

    Args:
        queries: [rows, K, G, D] of float32, scaled.
        keys: [K, context, D] of float32; the context ends with the rows.
        values: [K, context, D].
        first_seen: [rows] of int64, the first token of the context that each row sees; None for all of it.
        sinks: [K, G, 1] of float32; None for no attention sinks.
        soft_cap: see `StepAttention.attend`.

    Returns:
        [rows, H, D].
    """
    num_rows, num_kv_heads, group, head_dim = queries.shape
    context_len = keys.shape[1]
    # Rows token by token, and within a token head by head of the group.
    rows = queries.transpose(0, 1).reshape(num_kv_heads, num_rows * group, head_dim)
    columns = keys.mT
    if values.dtype != torch.bfloat16:
        values = values.float()
    tile = max(1, min(TILE_ROWS, TILE_SCORES // (num_kv_heads * group * context_len)))
    diagonal = torch.full((tile, tile), float("-inf"), device=rows.device).triu_(1).repeat_interleave(group, 0)
    outputs = []
    for start in range(0, num_rows, tile):
        end = min(start + tile, num_rows)
        num_seen = context_len - num_rows + end
        scores = _capped(torch.bmm(rows[:, start * group : end * group], columns[:, :, :num_seen]), soft_cap)
        scores[:, :, num_seen - (end - start) :] += diagonal[: (end - start) * group, : end - start]
        if first_seen is not None:
            firsts = first_seen[start:end].repeat_interleave(group)
            scores.masked_fill_(torch.arange(num_seen, device=rows.device) < firsts[:, None], float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.repeat(1, end - start, 1)), 2)
        weights = scores.softmax(-1)[:, :, :num_seen].to(values.dtype)
        outputs.append(torch.bmm(weights, values[:, :num_seen]))
    by_head = torch.cat(outputs, 1).view(num_kv_heads, num_rows, group, head_dim)
    return by_head.transpose(0, 1).flatten(1, 2)


def _capped(scores: Tensor, soft_cap: float | None) -> Tensor:
    """Return scaled scores with their soft cap, in place."""
    return scores if soft_cap is None else scores.div_(soft_cap).tanh_().mul_(soft_cap)


def _cut(length: int, piece: int) -> list[int]:
    """Cut a length into pieces; the last one may be shorter."""
    return [min(piece, length - start) for start in range(0, length, piece)]
