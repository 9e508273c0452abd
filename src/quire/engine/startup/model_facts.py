"""The facts of a model on which the engine's configuration depends: dtypes, caches, memory of a step, concurrency."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from quire.config import (
    CACHE_DTYPES,
    EngineConfig,
    ModelFacts,
    StepCost,
    capture_sizes,
    context_length,
    piece_sizes,
    step_tokens,
)
from quire.errors import ConfigError
from quire.execution.capture.captured_steps import CaptureOptions, has_captured_passes
from quire.execution.profile.gpu_graph_profile import measure_graph_bytes
from quire.execution.profile.gpu_memory_profile import StepLimits, measure_step_cost
from quire.memory.capacity.sizing import ArenaSizing, most_bytes, tokens_bytes
from quire.memory.specs import KVCacheSpec
from quire.models.capacity.pool_sizing import longest_bytes, memory_concurrency, size_pool
from quire.models.modules.causal_model import CausalModel
from quire.models.modules.encoder import Encoder
from quire.models.modules.mtp import MTPHead
from quire.models.specs.cache_layout import cache_specs
from quire.models.specs.hosted_spec import HostedSpec
from quire.ops import BFLOAT16_CAPABILITY

logger = logging.getLogger(__name__)


def cache_groups(config: EngineConfig, model: CausalModel | Encoder, stored: str) -> tuple[KVCacheSpec, ...]:
    """Return the cache groups of a model, in the order of its storages."""
    return cache_specs(model.spec, config.cache.block_size, CACHE_DTYPES[stored], model.dtype.itemsize)


def model_facts(
    config: EngineConfig, model: CausalModel | Encoder, groups: Sequence[KVCacheSpec], step: StepCost, device: str
) -> ModelFacts:
    """Return the model's facts for the resolution of the configuration."""

    def concurrency(num_blocks: int) -> int:
        return memory_concurrency(config, size_pool(groups, num_blocks), max_model_len, device)

    max_model_len = context_length(config.model.max_model_len, model.spec.max_position)
    interval = config.cache.state_snapshot_interval
    return ModelFacts(
        max_position=model.spec.max_position,
        bytes_per_token=tokens_bytes(groups) // config.cache.block_size,
        vocab_size=model.spec.vocab_size,
        num_parameters=sum(math.prod(shape) for shape in model.weights.shapes().values()),
        dtype=_name(model.dtype),
        kernels=model.kernels,
        most_bytes=most_bytes(groups, max_model_len, config.scheduler.max_num_seqs, interval),
        longest_bytes=longest_bytes(groups, max_model_len),
        concurrency=concurrency,
        host_blocks=lambda num_bytes: ArenaSizing.of(groups, num_bytes).layout.num_slabs,
        step=step,
        is_encoder=isinstance(model, Encoder),
        hosted=model.spec.notes if isinstance(model.spec, HostedSpec) else (),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_on(device: str, dtype: torch.dtype, option: str) -> torch.dtype:
    """Return the dtype of the weights on a device: float16 if the GPU has no bfloat16 and `option` is "auto".

    Args:
        device: "cpu" or "cuda".
        dtype: dtype that results from the option and the checkpoint.
        option: value of the option `dtype`.

    Raises:
        ConfigError: see `dtype_for`.
    """
    return dtype if device != "cuda" else dtype_for(torch.cuda.get_device_capability(), dtype, option)


def dtype_for(capability: tuple[int, int], dtype: torch.dtype, option: str) -> torch.dtype:
    """Return the dtype of the weights for a compute capability; see `dtype_on`."""
    if dtype != torch.bfloat16 or capability >= BFLOAT16_CAPABILITY:
        return dtype
    found = f"compute capability {capability[0]}.{capability[1]}, and bfloat16 needs 8.0"
    if option != "auto":
        raise ConfigError(f"dtype 'bfloat16' was asked for, but this GPU has {found}; use 'float16'", field="dtype")
    logger.warning("The weights of bfloat16 are rounded to float16: this GPU has %s", found)
    return torch.float16


def stored_dtype(config: EngineConfig, dtype: torch.dtype) -> str:
    """Return the name of the dtype of stored keys and values."""
    stored, plain = config.cache.kv_cache_dtype, _name(dtype)
    if stored == "auto":
        return plain
    if config.model.deterministic and stored not in (plain, "int8"):
        raise ConfigError(
            f"deterministic needs kv_cache_dtype 'auto', {plain!r} or 'int8', got {stored!r}", field="kv_cache_dtype"
        )
    return stored


def step_cost(
    config: EngineConfig, model: CausalModel | Encoder, draft: CausalModel | None, device: str, stored: str
) -> StepCost:
    """Return the GPU memory of a step; zero for an encoder, and on a CPU, whose steps are not measured."""
    if device == "cpu" or isinstance(model, Encoder):
        return StepCost()
    limits = StepLimits(
        config.scheduler.max_num_seqs,
        step_tokens(config.scheduler, device),
        context_length(config.model.max_model_len, model.spec.max_position),
        config.cache.block_size,
        config.speculative.num_tokens,
    )
    if isinstance(draft, MTPHead):
        costs = [measure_step_cost(model, limits, model.dtype, stored, draft)]
    else:
        costs = [measure_step_cost(each, limits, each.dtype, stored) for each in (model, draft) if each]
    return StepCost(
        fixed_bytes=max(cost.fixed_bytes for cost in costs) + _graph_bytes(config, model, draft, limits, stored),
        bytes_per_token=max(cost.bytes_per_token for cost in costs),
    )


def _graph_bytes(
    config: EngineConfig, model: CausalModel, draft: CausalModel | None, limits: StepLimits, stored: str
) -> int:
    """Return the GPU memory of the CUDA graphs of a model and of a draft model, which no other step can use."""
    options = CaptureOptions(
        capture_sizes(config, "cuda"), limits.max_model_len, piece_sizes(config, "cuda"), limits.max_num_seqs
    )
    taken = measure_graph_bytes(model, options, limits.block_size, model.dtype, stored)
    if draft is not None and has_captured_passes(draft):
        taken += measure_graph_bytes(draft, options.of_draft(), limits.block_size, draft.dtype, stored)
    return taken
