"""Derives slabs, concurrency and pin limits from the size of the KV pool, for the loader and for `quire plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.config import EngineConfig, ResolvedConfig, step_tokens
from quire.errors import ConfigError
from quire.memory.capacity.sizing import ArenaSizing, arena_bytes
from quire.memory.specs import KVCacheSpec


def size_pool(groups: Sequence[KVCacheSpec], num_blocks: int) -> ArenaSizing:
    """Return the arena in which each cache group of tokens has `num_blocks` blocks, null blocks besides."""
    return ArenaSizing.of(groups, arena_bytes(groups, num_blocks))


def num_slabs(sizing: ArenaSizing, share: float) -> int:
    """Return a share of the arena, such as the watermark's, in slabs (with one group: blocks)."""
    return int(sizing.layout.num_slabs * share)


def memory_concurrency(config: EngineConfig, sizing: ArenaSizing, num_tokens: int, device: str) -> int:
    """Return how many sequences of `num_tokens` tokens the memory lets run at once.

    `max_num_seqs` may allow fewer.

    Args:
        config: the options; the watermark and the tokens of a step count.
        sizing: sizing of the arena.
        num_tokens: tokens of each sequence.
        device: "cpu" or "cuda", on which the default tokens of a step depend.
    """
    return sizing.concurrency(
        num_tokens,
        step_tokens=step_tokens(config.scheduler, device),
        num_kept_free=num_slabs(sizing, config.cache.watermark),
    )


def check_pin_limit(resolved: ResolvedConfig, sizing: ArenaSizing) -> None:
    """Refuse a pin limit that leaves no room for a sequence of `max_model_len` tokens.

    Raises:
        ConfigError: with the numbers.
    """
    total = sizing.layout.num_slabs
    num_left = total - num_slabs(sizing, resolved.pin_limit)
    shortage = replace(sizing, layout=sizing.layout._replace(num_slabs=num_left)).shortage(resolved.max_model_len)
    if resolved.pin_limit and shortage is not None:
        raise ConfigError(
            f"pin_limit={resolved.pin_limit:g} leaves {num_left} of {total} blocks or slabs, but one sequence of "
            f"max_model_len={resolved.max_model_len} tokens needs {shortage.needed}: lower pin_limit or max_model_len, "
            "or give the KV cache more memory",
            field="pin_limit",
        )
