"""Checks that a model's weights and its KV cache fit into the available memory, before weights are read."""

from __future__ import annotations

import math
from typing import Final

import torch

from quire.config import CACHE_DTYPES, EngineConfig, ModelConfig, ParallelConfig, Quantization
from quire.engine.startup.model_facts import stored_dtype
from quire.errors import ConfigError
from quire.models.capacity.pool_sizing import check_pool
from quire.models.capacity.rank_part import rank_spec, stored_spec
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families.quantization_config import read_quantization_config
from quire.models.hosted.choice import read_decoder
from quire.models.specs.cache_layout import cache_specs
from quire.models.specs.hosted_spec import HostedSpec
from quire.models.specs.parameter_estimate import estimate_parameters, smaller_forms, weight_bytes
from quire.models.specs.spec import ModelSpec
from quire.platform.host_probe import probe, swap_bytes

# A bfloat16 weight that is packed without loss takes at least 12 bits.
LOSSLESS_SHARE: Final = 0.75


def check_weights(
    options: ModelConfig, parallel: ParallelConfig, checkpoint: Checkpoint, device: str, dtype: torch.dtype
) -> None:
    """Refuse a model whose weights cannot fit: a host that runs out of memory kills the process without a message."""
    is_gguf = checkpoint.gguf_fields is not None
    if read_quantization_config(checkpoint.config) is not None or (is_gguf and options.quantization is not None):
        return  # the size depends on the stored form of each tensor
    spec = read_decoder(checkpoint.config, options.model_impl).spec
    if parallel.tensor_parallel_size > 1 and isinstance(spec, ModelSpec):
        spec = stored_spec(rank_spec(spec, parallel), parallel)
    is_packed = options.weight_packing != "plain" and dtype == torch.bfloat16
    num_parts = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    given = options.quantization

    def least(form: Quantization | None) -> int:
        if is_gguf:
            return _stored_bytes(checkpoint, dtype) // num_parts
        num_bytes = _least_bytes(spec, dtype, form, device, is_packed=is_packed)
        return num_bytes // parallel.pipeline_parallel_size

    machine = probe(device)
    available = machine.available_bytes + (swap_bytes() if device == "cpu" else 0)
    if least(given) <= available:
        return
    forms = () if is_gguf else smaller_forms(given)
    advice = [f"quantization {form!r} takes {least(form):,}" for form in forms if least(form) <= available]
    advice.append("or take a smaller model" if advice else "take a smaller model")
    if device == "cuda":
        advice.append("or divide it with tensor_parallel_size")
    part = "" if num_parts == 1 else " on each rank"
    where = "the GPU" if device == "cuda" else "this machine"
    raise ConfigError(
        f"model {options.model!r} does not fit: its weights take at least {least(given):,} bytes{part}, and {where} "
        f"has {available:,} to spare; {', '.join(advice)}",
        field="model",
    )


def check_cache(config: EngineConfig, checkpoint: Checkpoint, device: str, dtype: torch.dtype) -> None:
    """Refuse a size of the KV cache that is too small or too large, where the model's configuration tells."""
    is_given = config.cache.kv_cache_memory_bytes is not None or config.cache.num_kv_blocks is not None
    # A draft model has a share of each block, and a stage the layers of some.
    if not is_given or config.speculative.num_tokens or config.parallel.pipeline_parallel_size > 1:
        return
    spec = read_decoder(checkpoint.config, config.model.model_impl).spec
    if config.parallel.tensor_parallel_size > 1 and isinstance(spec, ModelSpec):
        spec = rank_spec(spec, config.parallel)
    cached = CACHE_DTYPES[stored_dtype(config, dtype)]
    groups = cache_specs(spec, config.cache.block_size, cached, dtype.itemsize)
    check_pool(config, groups, probe(device), spec.max_position)


def _least_bytes(
    spec: ModelSpec | HostedSpec, dtype: torch.dtype, form: Quantization | None, device: str, *, is_packed: bool
) -> int:
    """Return a lower bound of the bytes of a model's matrices."""
    num_bytes = weight_bytes(spec, dtype.itemsize, form, device)
    if device == "cuda":
        return num_bytes
    # Tables of embeddings may stay in mapped pages of the checkpoint, which the host can drop.
    num_bytes -= estimate_parameters(spec).tables * dtype.itemsize
    return int(num_bytes * LOSSLESS_SHARE) if is_packed and form is None else num_bytes


def _stored_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Return a lower bound of the bytes of a GGUF file's matrices, from their sizes in the file."""
    total = 0.0
    for name, tensor in checkpoint.tensors.items():
        if len(tensor.shape) > 1 and "embed" not in name:
            is_plain = tensor.dtype in ("BF16", "F16", "F32")
            total += LOSSLESS_SHARE * math.prod(tensor.shape) * dtype.itemsize if is_plain else tensor.num_bytes
    return int(total)
