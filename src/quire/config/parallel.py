"""Options of tensor, pipeline and expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from quire.config.checks import OWN, check_choices, check_flag, check_positive, check_served, check_whole
from quire.config.cpu_bind import AUTO, MAX_CPU, check_cpu_bind, cpu_lists
from quire.errors import ConfigError

MAX_RANKS: Final = 64
ALL_REDUCE_BACKENDS: Final = ("auto", "shared_memory", "gloo", "nccl")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Several processes (ranks) that share a model: each has a part of every layer, some layers, or parts of some.

    Args:
        tensor_parallel_size: number of ranks among which each layer is divided, 1 to 64. Quire starts them on this
            host, unless torchrun has started this process as one of them.
        pipeline_parallel_size: number of pipeline stages, which have consecutive layers, 1 to 64; their ranks are
            started in the same way. Each stage has `tensor_parallel_size` ranks: the product of both is the number of
            processes, 64 at most.
        pipeline_microbatches: number of batches, of different requests, that are in the stages at the same time, 1 to
            64; None takes one per stage.
        all_reduce_backend: transport of all-reduces: "shared_memory" (one host, native kernels) or "gloo" (sockets);
            "auto" takes shared memory if all ranks have it. On GPUs, "auto" and "nccl" take NCCL, and the other two go
            through host memory, which is slow.
        distributed_timeout_s: seconds within which each rank must take part in an all-reduce of a step; a rank that
            does not, or that has ended, ends all ranks.
        enable_expert_parallel: expert parallelism: each rank has whole experts, instead of some columns of each expert.
        cpu_bind: processor cores of the ranks: "auto" gives each rank its own cores, of one NUMA node if possible;
            "none" leaves the choice to the operating system; or a list for each rank of a host, such as "0-3|4-7".
    """

    tensor_parallel_size: int = 1
    all_reduce_backend: str = field(default="auto", metadata={"choices": ALL_REDUCE_BACKENDS})
    distributed_timeout_s: float = 60.0
    pipeline_parallel_size: int = 1
    pipeline_microbatches: int | None = None
    enable_expert_parallel: bool = False
    cpu_bind: str = field(default=AUTO, metadata=OWN)

    def __post_init__(self) -> None:
        check_choices(self)
        check_whole("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_RANKS)
        check_positive("distributed_timeout_s", self.distributed_timeout_s)
        check_whole("pipeline_parallel_size", self.pipeline_parallel_size, 1, MAX_RANKS)
        if self.pipeline_microbatches is not None:
            check_whole("pipeline_microbatches", self.pipeline_microbatches, 1, MAX_RANKS)
        if self.num_ranks > MAX_RANKS:
            raise ConfigError(
                f"pipeline_parallel_size must be at most {MAX_RANKS // self.tensor_parallel_size} with "
                f"tensor_parallel_size {self.tensor_parallel_size}, got {self.pipeline_parallel_size}: a model has at "
                f"most {MAX_RANKS} processes",
                field="pipeline_parallel_size",
            )
        check_cpu_bind(self.cpu_bind, self.num_ranks)
        check_flag("enable_expert_parallel", self.enable_expert_parallel)
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(
                "enable_expert_parallel divides experts among ranks: tensor_parallel_size must be above 1, got 1",
                field="enable_expert_parallel",
            )

    @property
    def num_ranks(self) -> int:
        """Number of processes that share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_microbatches(self) -> int:
        """Number of batches that are in the stages at the same time; 1 without stages."""
        if self.pipeline_parallel_size == 1:
            return 1
        return self.pipeline_microbatches or self.pipeline_parallel_size


def check_num_threads(options: dict[str, Any]) -> None:
    """Refuse more threads than a rank has cores."""
    fewest = min(map(len, cpu_lists(options["cpu_bind"]) or ()), default=MAX_CPU)
    if (options["num_threads"] or 1) > fewest:
        raise ConfigError(
            f"num_threads must be at most the number of cores of each rank in cpu_bind, which is {fewest}, got "
            f"{options['num_threads']}",
            field="num_threads",
        )


def check_served_by_ranks(options: dict[str, Any], size: int) -> None:
    """Refuse options that are not supported with several ranks."""
    if size > 1:
        check_served(options, _SERVED, "tensor_parallel_size above 1")
        if options["all_reduce_backend"] == "nccl" and options["device"] == "cpu":
            raise ConfigError(
                "all_reduce_backend must be 'auto', 'shared_memory' or 'gloo' with device 'cpu', got 'nccl', which is "
                "for GPUs",
                field="all_reduce_backend",
            )


# Options with the values that are supported with several ranks, and the reason why others are not.
_SERVED: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    **dict.fromkeys(
        ("prefix_cache_url", "kv_transfer_config"),
        ((None,), "blocks from elsewhere would be loaded at other times on each rank"),
    ),
}


# Options with the values that are supported with pipeline stages, and the reason why others are not.
_SERVED_BY_STAGES: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    **_SERVED,
    "speculative_method": (("off", "ngram", "suffix"), "models that make drafts are not divided into stages"),
    "prefix_cache_write_policy": ((None, "write_back"), "blocks go to disk in the order of plans, not as requests end"),
    "max_inter_token_ms": ((None,), "a step is one of several between two tokens of a request"),
    "device": (("auto", "cpu"), "stages exchange hidden states between CPUs"),
    "all_reduce_backend": (("auto", "shared_memory", "gloo"), "NCCL is for GPUs"),
}


def check_served_by_stages(options: dict[str, Any], size: int) -> None:
    """Refuse options that are not supported with pipeline stages."""
    if size > 1:
        check_served(options, _SERVED_BY_STAGES, "pipeline_parallel_size above 1")
