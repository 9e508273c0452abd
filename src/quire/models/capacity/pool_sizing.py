"""Derives slabs, concurrency and pin limits from the size of the KV pool, for the loader and for `quire plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.config import (
    EngineConfig,
    Machine,
    ResolvedConfig,
    StepCost,
    context_length,
    pool_blocks,
    step_tokens,
    sufficient_blocks,
)
from quire.errors import ConfigError
from quire.memory.capacity.sizing import ArenaSizing, arena_bytes, most_bytes, tokens_bytes
from quire.memory.specs import KVCacheSpec

# Minimum of a context that is fitted to the memory; a shorter one would surprise users more than an error.
MIN_FITTED_CONTEXT = 512


def size_pool(groups: Sequence[KVCacheSpec], num_blocks: int) -> ArenaSizing:
    """Return the arena with `num_blocks` blocks, besides null blocks, for each cache group of tokens."""
    return ArenaSizing.of(groups, arena_bytes(groups, num_blocks))


def longest_bytes(groups: Sequence[KVCacheSpec], max_model_len: int) -> int:
    """Return the bytes of the smallest pool that holds one sequence of `max_model_len` tokens."""
    return ArenaSizing.of(groups, 0).bytes_for(max_model_len)


def check_pool(config: EngineConfig, groups: Sequence[KVCacheSpec], machine: Machine, max_position: int) -> None:
    """Refuse a size of the KV cache with which the engine cannot start, whatever weights and steps take.

    Args:
        config: options of the engine.
        groups: cache specs of the model.
        machine: machine before the weights are loaded.
        max_position: longest context that the model supports, in tokens.

    Raises:
        ConfigError: the size exceeds the memory, or holds no sequence of `max_model_len` tokens.
    """
    config, _ = fit_context(config, groups, machine, max_position, StepCost())
    cache, max_num_seqs = config.cache, config.scheduler.max_num_seqs
    max_model_len = context_length(config.model.max_model_len, max_position)
    sufficient_blocks(
        cache,
        machine.set_aside(cache.host_bytes, cache.host_option),
        tokens_bytes(groups),
        max_model_len,
        max_num_seqs,
        most_bytes(groups, max_model_len, max_num_seqs, cache.state_snapshot_interval),
        longest_bytes(groups, max_model_len),
        StepCost(),
    )


def fit_context(
    config: EngineConfig, groups: Sequence[KVCacheSpec], machine: Machine, max_position: int, step: StepCost
) -> tuple[EngineConfig, int | None]:
    """Return the options with the longest context that fits the memory, and the model's limit if it was cut, else None.

    The options are not changed if they set `max_model_len`, or if the memory holds the model's own limit, or less than
    `MIN_FITTED_CONTEXT` tokens.

    Args:
        config: options of the engine.
        groups: cache specs of all models.
        machine: machine after the weights are loaded.
        max_position: longest context that the model supports, in tokens.
        step: memory of a step on a GPU.

    Raises:
        ConfigError: the options exceed the available memory.
    """
    if config.model.max_model_len is not None:
        return config, None
    cache, max_num_seqs = config.cache, config.scheduler.max_num_seqs
    num_blocks, _ = pool_blocks(
        cache,
        machine.set_aside(cache.host_bytes, cache.host_option),
        tokens_bytes(groups),
        max_position,
        max_num_seqs,
        most_bytes(groups, max_position, max_num_seqs, cache.state_snapshot_interval),
        step,
    )
    if num_blocks < 1:
        return config, None
    sizing = size_pool(groups, num_blocks)
    longest = _without(sizing, num_slabs(sizing, cache.pin_limit)).longest(max_position)
    if not MIN_FITTED_CONTEXT <= longest < max_position:
        return config, None
    return replace(config, model=replace(config.model, max_model_len=longest)), max_position


def _without(sizing: ArenaSizing, count: int) -> ArenaSizing:
    """Return the sizing of an arena with `count` fewer slabs."""
    return replace(sizing, layout=sizing.layout._replace(num_slabs=sizing.layout.num_slabs - count))


def num_slabs(sizing: ArenaSizing, share: float) -> int:
    """Return the number of slabs (with one group: blocks) in a share of the arena."""
    return int(sizing.layout.num_slabs * share)


def num_kept_free(sizing: ArenaSizing, watermark: float) -> int:
    """Return the number of slabs (with one group: blocks) of the watermark, rounded; see decision 011."""
    return int(sizing.layout.num_slabs * watermark + 0.5)


def memory_concurrency(config: EngineConfig, sizing: ArenaSizing, num_tokens: int, device: str) -> int:
    """Return the number of sequences of `num_tokens` tokens that the memory holds at once.

    `max_num_seqs` may allow fewer.

    Args:
        config: engine options, of which the watermark and the tokens of a step are read.
        sizing: sizing of the arena.
        num_tokens: tokens of each sequence.
        device: "cpu" or "cuda", on which the default tokens of a step depend.
    """
    return sizing.concurrency(
        num_tokens,
        step_tokens=step_tokens(config.scheduler, device),
        num_kept_free=num_kept_free(sizing, config.cache.watermark),
    )


def check_pin_limit(resolved: ResolvedConfig, sizing: ArenaSizing) -> None:
    """Refuse a pin limit that leaves no room for a sequence of `max_model_len` tokens.

    Raises:
        ConfigError: the limit is too large; the message has the numbers.
    """
    total = sizing.layout.num_slabs
    num_pinned = num_slabs(sizing, resolved.pin_limit)
    num_left, shortage = total - num_pinned, _without(sizing, num_pinned).shortage(resolved.max_model_len)
    if resolved.pin_limit and shortage is not None:
        raise ConfigError(
            f"pin_limit={resolved.pin_limit:g} leaves {num_left} of {total} blocks or slabs, but one sequence of "
            f"max_model_len={resolved.max_model_len} tokens needs {shortage.needed}: lower pin_limit or max_model_len, "
            "or give the KV cache more memory",
            field="pin_limit",
        )
