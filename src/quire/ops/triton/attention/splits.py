"""Lengths of KV splits, chosen so that all SMs of a GPU have work."""

from __future__ import annotations

from typing import Final

# Minimum tokens of a split: a shorter one costs more in partial results than its parallelism gains.
MIN_SPLIT: Final = 128
# Target number of programs per SM for few sequences.
PROGRAMS_PER_PROCESSOR: Final = 2
# Target for so many sequences that all SMs have work without splits: splits then even out the lengths of programs, and
# shorter programs leave fewer SMs idle at the end (the last wave).
EVEN_PROGRAMS_PER_PROCESSOR: Final = 12
EVEN_MIN_SPLIT: Final = 512


def split_length(
    num_tokens: int, num_kv_heads: int, num_processors: int, tile_tokens: int, num_sequences: int = 0
) -> int:
    """Return the number of tokens of a split, a multiple of the tile size unless it is the minimum.

    Args:
        num_tokens: number of tokens of all sequences.
        num_kv_heads: K; each head has programs of its own.
        num_processors: number of SMs of the GPU.
        tile_tokens: number of tokens of a tile.
        num_sequences: number of sequences; 0 to split as for few sequences.
    """
    num_programs, least = split_bounds(num_sequences, num_kv_heads, num_processors)
    share = -(-num_tokens * num_kv_heads // num_programs)
    return max(least, -(-share // tile_tokens) * tile_tokens)


def split_bounds(num_sequences: int, num_kv_heads: int, num_processors: int) -> tuple[int, int]:
    """Return the target number of programs, and the minimum tokens of a split; see `split_length`."""
    wanted = _programs_per_processor(num_sequences, num_kv_heads, num_processors)
    return wanted * num_processors, MIN_SPLIT if wanted == PROGRAMS_PER_PROCESSOR else EVEN_MIN_SPLIT


def busy_sequences(num_kv_heads: int, num_processors: int) -> int:
    """Return the number of sequences from which on all SMs have work without splits."""
    return -(-PROGRAMS_PER_PROCESSOR * num_processors // num_kv_heads)


def most_splits(num_kv_heads: int, num_processors: int, num_sequences: int = 0) -> int:
    """Return the maximum number of full splits of `split_length`, for any number of tokens."""
    wanted = _programs_per_processor(num_sequences, num_kv_heads, num_processors)
    return -(-wanted * num_processors // num_kv_heads)


def _programs_per_processor(num_sequences: int, num_kv_heads: int, num_processors: int) -> int:
    is_busy = num_sequences >= busy_sequences(num_kv_heads, num_processors)
    return EVEN_PROGRAMS_PER_PROCESSOR if is_busy else PROGRAMS_PER_PROCESSOR
