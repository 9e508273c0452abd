"""The memory of a GPU besides weights and KV cache: of steps, which an engine would measure, and of captured steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from quire.config import EngineConfig, StepCost, capture_sizes, step_tokens
from quire.models.capacity.report import GPUPlan
from quire.models.capacity.step_memory import StepSizes, captured_bytes, step_bytes
from quire.models.specs.hosted_spec import HostedSpec
from quire.models.specs.spec import ModelSpec


def plan_gpu(
    config: EngineConfig,
    specs: Sequence[ModelSpec | HostedSpec],
    max_model_len: int,
    element_bytes: int,
    memory_bytes: int,
) -> GPUPlan:
    """Return the memory of a GPU besides weights and KV cache.

    Args:
        config: engine options.
        specs: the model, and a draft model or head; or one rank's part of each.
        max_model_len: maximum number of tokens of a sequence.
        element_bytes: bytes of an element of the weights' dtype.
        memory_bytes: memory of the GPU.
    """
    scheduler = config.scheduler
    sizes = StepSizes(
        step_tokens(scheduler, "cuda"),
        scheduler.max_num_seqs,
        max_model_len,
        config.speculative.num_tokens,
        element_bytes,
        config.model.quantization is not None,
        config.parallel.tensor_parallel_size,
    )
    return GPUPlan(
        memory_bytes=memory_bytes,
        gpu_memory_utilization=config.cache.gpu_memory_utilization,
        tensor_parallel_size=config.parallel.tensor_parallel_size,
        step_bytes=max(step_bytes(spec, sizes) for spec in specs),
        graph_bytes=_graph_bytes(config, specs, sizes),
    )


def step_cost(gpu: GPUPlan | None, image_bytes: int) -> StepCost:
    """Return the cost of a step for `pool_blocks`, without the small part that grows with cached tokens."""
    fixed_bytes = 0 if gpu is None else gpu.step_bytes + gpu.graph_bytes
    return StepCost(fixed_bytes=fixed_bytes, image_bytes=image_bytes)


def _graph_bytes(config: EngineConfig, specs: Sequence[ModelSpec | HostedSpec], sizes: StepSizes) -> int:
    """Return the bytes of captured steps, and of passes that make drafts, which ranks do not capture."""
    rows = capture_sizes(replace(config, model=replace(config.model, kernels="triton")), "cuda")
    if not rows:
        return 0
    target, *drafts = specs if config.parallel.tensor_parallel_size == 1 else specs[:1]
    of_drafts = rows[min(bisect_left(rows, sizes.max_num_seqs), len(rows) - 1)]
    blocks = -(-sizes.max_model_len // config.cache.block_size)
    return sum(
        captured_bytes(spec, sizes, count, count * blocks * len(spec.cache_groups), makes_drafts=spec is not target)
        for spec, count in ((target, rows[-1]), *((draft, of_drafts) for draft in drafts))
    )
