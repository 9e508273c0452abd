"""The request and the result of capacity planning, as values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.models.capacity.step_memory import ImageMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The options of a plan.

    Args:
        config: engine options. Device "cuda" plans for a GPU, or with `tensor_parallel_size` for one of several.
        memory_bytes: memory of the whole machine, or of its GPU; None if only the size of the cache is given.
        weights_bytes: bytes of the weights in this memory, including a draft model's; None for an estimate.
        lengths: sequence lengths in tokens; empty for the planner's `LENGTHS`.
        find_images: function from the options and the content of the `config.json` of a model with an encoder to the
            memory of images besides its weights, None if the engine would read no images; None for plans without it.
    """

    config: EngineConfig
    memory_bytes: int | None = None
    weights_bytes: int | None = None
    lengths: tuple[int, ...] = ()
    find_images: Callable[[EngineConfig, Mapping[str, Any]], ImageMemory | None] | None = None

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "weights_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", field=name)
        if self.weights_bytes is not None and self.memory_bytes is None:
            raise ConfigError(
                "weights_bytes is taken off memory, which is not given: add --memory", field="weights_bytes"
            )
        num_ranks = self.config.parallel.tensor_parallel_size
        if num_ranks > 1 and not self.is_gpu:
            raise ConfigError(
                f"tensor_parallel_size must be 1 with device {self.config.model.device!r}, got {num_ranks}: ranks are "
                "planned for GPUs, with device 'cuda'",
                field="tensor_parallel_size",
            )

    @property
    def is_gpu(self) -> bool:
        """True if the plan is for a GPU."""
        return self.device == "cuda"

    @property
    def device(self) -> str:
        """Device of the plan, "cpu" or "cuda"; "auto" is the CPU here, even on a machine with a GPU."""
        return "cuda" if self.config.model.device == "cuda" else "cpu"

    @property
    def has_budget(self) -> bool:
        """True if the memory or an option determines the bytes of the cache."""
        cache = self.config.cache
        return any(limit is not None for limit in (self.memory_bytes, cache.kv_cache_memory_bytes, cache.num_kv_blocks))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """One cache group.

    Args:
        kind: description of the tokens or states in the cache.
        is_draft: whether the layers belong to the draft model or the MTP head.
        num_layers: number of layers.
        bytes_per_token, bytes_per_block: bytes of all layers together; None for a group of states.
        bytes_per_sequence: bytes of a state; None for a group of blocks.
        num_blocks: number of blocks, or states, in the whole arena without other groups; None without a budget.
    """

    kind: str
    is_draft: bool
    num_layers: int
    bytes_per_token: int | None
    bytes_per_block: int | None
    bytes_per_sequence: int | None
    num_blocks: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPlan:
    """Sequences of one length.

    Args:
        num_tokens: length of each sequence.
        sequence_bytes: most bytes of one sequence while it grows to this length.
        concurrency: number of sequences that run at once, at most `max_num_seqs`; None without a budget.
    """

    num_tokens: int
    sequence_bytes: int
    concurrency: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUPlan:
    """The memory of a GPU besides weights and KV cache. All sizes are in bytes.

    Args:
        memory_bytes: memory of the GPU.
        gpu_memory_utilization: share of this memory for weights, steps and the KV cache together.
        tensor_parallel_size: number of GPUs that share the model; the plan is for one of them.
        step_bytes: estimate for the largest step.
        graph_bytes: estimate for captured steps, without the driver's memory for each.
    """

    memory_bytes: int
    gpu_memory_utilization: float
    tensor_parallel_size: int
    step_bytes: int
    graph_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The KV memory of a model, and of its draft model if there is one. All sizes are in bytes.

    Args:
        model, architecture: name of the model and of its architecture.
        draft_model, draft_architecture: the same for the draft model; None without one. For the model's own MTP head,
            only the architecture.
        dtype, kv_cache_dtype: dtype of the weights, and of keys and values.
        block_size: tokens per block.
        max_model_len: longest sequence that the engine accepts, in tokens.
        groups: cache groups, token caches before states; then the groups of the draft model or head.
        bytes_per_token: bytes of one token in all groups.
        weights_bytes: bytes of the weights of both models and of the encoder; None if the request states no memory.
        encoder_bytes: bytes of the weights of the encoder of images; None if none is loaded.
        image_bytes: bytes that are set aside for the largest image, and for features of images; None for no images.
        is_weights_estimate: whether `weights_bytes` was estimated.
        gpu: memory of a GPU and of its steps; None on a CPU, or if the request states no memory.
        arena_bytes: bytes of the cache, null blocks included; None without a budget.
        longest: longest sequence that fits, prompt and output together, at most `max_model_len`; None without a budget.
        never: sentence about the prompts that never fit, with the reason; None without a budget.
        lengths: plans for single sequence lengths.
        sequence_bytes: most bytes of a sequence while it grows to `max_model_len` tokens.
        notes: assumptions of the numbers.
    """

    model: str
    architecture: str
    draft_model: str | None
    draft_architecture: str | None
    dtype: str
    kv_cache_dtype: str
    block_size: int
    max_model_len: int
    groups: tuple[GroupPlan, ...]
    bytes_per_token: int
    weights_bytes: int | None
    encoder_bytes: int | None
    image_bytes: int | None
    is_weights_estimate: bool
    gpu: GPUPlan | None
    arena_bytes: int | None
    longest: int | None
    never: str | None
    lengths: tuple[LengthPlan, ...]
    sequence_bytes: int
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """True unless a sequence of `max_model_len` tokens exceeds the budget."""
        return self.longest is None or self.longest == self.max_model_len
