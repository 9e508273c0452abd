"""Lengths of the parts into which tokens are cut, so that all processors of a GPU have work."""

from __future__ import annotations

from typing import Final

# Tokens of the shortest split: a shorter one costs more in partial results than it brings in parallel work.
MIN_SPLIT: Final = 128
# Programs that are wanted for each processor of the GPU where sequences are few.
PROGRAMS_PER_PROCESSOR: Final = 2
# Where there are so many sequences that all processors have work, contexts are cut for as many: programs that take
# equally long end together, but for the last ones, which leave processors idle. Shorter ones leave fewer.
EVEN_PROGRAMS_PER_PROCESSOR: Final = 12
EVEN_MIN_SPLIT: Final = 512


def split_length(
    num_tokens: int, num_kv_heads: int, num_processors: int, tile_tokens: int, num_sequences: int = 0
) -> int:
    """Return the number of tokens of a split, a multiple of a tile's, for work on all processors.

    Args:
        num_tokens: number of tokens of all sequences.
        num_kv_heads: K; each head has programs of its own.
        num_processors: number of processors of the GPU.
        tile_tokens: number of tokens of a tile.
        num_sequences: number of sequences; 0 where they are to be cut as few ones are.
    """
    num_programs, least = split_bounds(num_sequences, num_kv_heads, num_processors)
    share = -(-num_tokens * num_kv_heads // num_programs)
    return max(least, -(-share // tile_tokens) * tile_tokens)


def split_bounds(num_sequences: int, num_kv_heads: int, num_processors: int) -> tuple[int, int]:
    """Return how many programs are wanted, and the tokens of the shortest split; see `split_length`."""
    wanted = _programs_per_processor(num_sequences, num_kv_heads, num_processors)
    return wanted * num_processors, MIN_SPLIT if wanted == PROGRAMS_PER_PROCESSOR else EVEN_MIN_SPLIT


def busy_sequences(num_kv_heads: int, num_processors: int) -> int:
    """Return from how many sequences on contexts are cut for processors that all have work."""
    return -(-PROGRAMS_PER_PROCESSOR * num_processors // num_kv_heads)


def most_splits(num_kv_heads: int, num_processors: int, num_sequences: int = 0) -> int:
    """Return how many splits of that length any number of tokens has at most, where each is full."""
    wanted = _programs_per_processor(num_sequences, num_kv_heads, num_processors)
    return -(-wanted * num_processors // num_kv_heads)


def _programs_per_processor(num_sequences: int, num_kv_heads: int, num_processors: int) -> int:
    is_busy = num_sequences >= busy_sequences(num_kv_heads, num_processors)
    return EVEN_PROGRAMS_PER_PROCESSOR if is_busy else PROGRAMS_PER_PROCESSOR
