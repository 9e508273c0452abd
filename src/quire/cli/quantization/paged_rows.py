"""Runs a decoder over whole sequences in one step with a temporary paged KV cache, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from quire.execution.step.kv_storage import make_storages
from quire.models.modules.causal_model import CausalModel
from quire.models.specs.spec import StateCacheShape, TokenCacheShape
from quire.ops.interface.ops import AttentionBatch, StateBatch

BLOCK_SIZE: Final = 16
CPU: Final = torch.device("cpu")


def run_sequences(
    decoder: CausalModel, input_ids: Tensor, lengths: Sequence[int], embeddings: Tensor | None = None
) -> Tensor:
    """Run a decoder over sequences from their first tokens."""
    starts = list(accumulate(lengths, initial=0))
    num_blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    caches = [group.cache for group in decoder.cache_groups]
    counts = [1 + (sum(num_blocks) if isinstance(cache, TokenCacheShape) else len(lengths)) for cache in caches]
    storages = make_storages(decoder.cache_groups, counts, BLOCK_SIZE, decoder.dtype, CPU)
    groups = [_batch(cache, starts, num_blocks) for cache in caches]
    positions = torch.cat([torch.arange(length) for length in lengths])
    indexed_embeddings = None if embeddings is None else (torch.arange(len(input_ids)), embeddings)
    with torch.inference_mode():
        return decoder(input_ids, positions, groups, storages, indexed_embeddings)


def split_sequences(lengths: Sequence[int], most: int) -> list[tuple[slice, list[int]]]:
    """Divide sequences into runs of at most `most` tokens, or of one sequence; return their rows and lengths."""
    runs: list[tuple[slice, list[int]]] = []
    first = 0
    for length in lengths:
        if not runs or first + length - runs[-1][0].start > most:
            runs.append((slice(first, first), []))
        rows, parts = runs[-1]
        first += length
        runs[-1] = slice(rows.start, first), [*parts, length]
    return runs


def _batch(
    cache: TokenCacheShape | StateCacheShape, starts: list[int], num_blocks: list[int]
) -> AttentionBatch | StateBatch:
    """Return the batch for a cache group; the blocks of the sequences are consecutive, after the null block."""
    lengths = [end - start for start, end in pairwise(starts)]
    if isinstance(cache, StateCacheShape):
        return StateBatch(list(range(1, len(starts))), starts, [False] * len(lengths))
    block_starts = list(accumulate(num_blocks, initial=0))
    slots = [
        torch.arange(length) + (1 + block) * BLOCK_SIZE for block, length in zip(block_starts, lengths, strict=False)
    ]
    blocks = torch.arange(1, 1 + block_starts[-1])
    return AttentionBatch(torch.cat(slots), starts, lengths, blocks, block_starts, cache.window, cache.chunk)
