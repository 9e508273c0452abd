"""Lengths of the parts into which tokens are cut, so that all processors of a GPU have work."""

from __future__ import annotations

from typing import Final

# Tokens of the shortest split: a shorter one costs more in partial results than it brings in parallel work.
MIN_SPLIT: Final = 256
# Programs that are wanted for each processor of the GPU.
PROGRAMS_PER_PROCESSOR: Final = 2


def split_length(num_tokens: int, num_kv_heads: int, num_processors: int, tile_tokens: int) -> int:
    """Return the number of tokens of a split, a multiple of a tile's, for work on all processors."""
    share = -(-num_tokens * num_kv_heads // (PROGRAMS_PER_PROCESSOR * num_processors))
    return max(MIN_SPLIT, -(-share // tile_tokens) * tile_tokens)


def most_splits(num_kv_heads: int, num_processors: int) -> int:
    """Return how many splits of that length any number of tokens has at most, where each is full."""
    return -(-PROGRAMS_PER_PROCESSOR * num_processors // num_kv_heads)
