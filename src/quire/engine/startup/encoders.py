"""The configuration of an encoder's engine: steps hold the longest prompt, no KV cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.config import EngineConfig, context_length, step_tokens
from quire.errors import ConfigError, shown
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.pooling_config import read_max_length
from quire.models.specs.encoder_spec import EncoderSpec

# Options that an encoder does not support, and their neutral values.
NEUTRAL: dict[str, Any] = {
    "kv_cache_dtype": "auto",
    "num_kv_blocks": None,
    "kv_cache_memory_bytes": None,
    "swap_space": 0,
    "pin_limit": 0.0,
    "prefix_cache_dir": None,
    "prefix_cache_url": None,
    "kv_transfer_config": None,
    "speculative_method": "off",
    "classifier_from_token": None,
    "deterministic": False,
    "enable_lora": False,
    "merge_lora": False,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
}


def encoder_config(config: EngineConfig, checkpoint: Checkpoint, spec: EncoderSpec, device: str) -> EngineConfig:
    """Return the configuration with which an encoder is served.

    Its prompts are as long as the model, the checkpoint's `max_seq_length`, `max_model_len` and a step's tokens allow.
    Without `max_num_batched_tokens` a step holds the longest prompt.
    """
    model, cache, scheduler = config.model, config.cache, config.scheduler
    for name, neutral in NEUTRAL.items():
        part = next(
            each for each in (model, cache, config.speculative, config.lora, config.parallel) if hasattr(each, name)
        )
        if getattr(part, name) != neutral:
            raise ConfigError(
                f"{name}={shown(getattr(part, name))} is for models that generate, and this one is an encoder without "
                f"a KV cache: leave {name} out",
                field=name,
            )
    longest = context_length(model.max_model_len, spec.max_position)
    if model.max_model_len is None:
        longest = min(longest, read_max_length(checkpoint) or longest)
    budget = scheduler.max_num_batched_tokens
    if budget is None:
        budget = max(step_tokens(scheduler, device), longest)
    elif budget < longest and model.max_model_len is not None:
        raise ConfigError(
            f"max_num_batched_tokens ({budget}) is less than max_model_len ({longest}), and an encoder computes a "
            f"prompt in one step: set max_model_len to at most {budget}",
            field="max_num_batched_tokens",
        )
    longest = min(longest, budget)
    # Blocks for a full step; each sequence may leave a part of its last block unused, and gets one slot more.
    num_blocks = -(-budget // cache.block_size) + 2 * scheduler.max_num_seqs
    return replace(
        config,
        model=replace(model, max_model_len=longest),
        cache=replace(cache, enable_prefix_caching=False, num_kv_blocks=num_blocks, watermark=0.0),
        scheduler=replace(scheduler, max_num_batched_tokens=budget),
    )
