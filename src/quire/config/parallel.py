"""Options of several processes that share a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from quire.config.checks import check_choices, check_flag, check_positive, check_whole
from quire.config.cpu_bind import AUTO, MAX_CPU, check_cpu_bind, cpu_lists
from quire.errors import ConfigError

MAX_RANKS: Final = 64
ALL_REDUCE_BACKENDS: Final = ("auto", "shared_memory", "gloo")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Tensor parallelism: several processes (ranks), each with a part of every layer.

    Args:
        tensor_parallel_size: number of ranks that share the model, 1 to 64. Quire starts them on this host, unless
            torchrun has started this process as one of them.
        all_reduce_backend: way in which ranks sum their parts: "shared_memory" (one host, native kernels) or "gloo"
            (sockets); "auto" takes shared memory where all ranks have it.
        distributed_timeout_s: seconds within which each rank must take part in a sum of a step; one that does not, or
            has ended, ends all.
        enable_expert_parallel: divide a model's experts by their number, so that each rank has whole experts, in place
            of columns of each.
        cpu_bind: processor cores of the ranks: "auto" gives each rank cores of its own, of one NUMA node where it can;
            "none" leaves them to the system; or a list for each rank of a host, such as "0-3|4-7".
    """

    tensor_parallel_size: int = 1
    all_reduce_backend: str = field(default="auto", metadata={"choices": ALL_REDUCE_BACKENDS})
    distributed_timeout_s: float = 60.0
    enable_expert_parallel: bool = False
    cpu_bind: str = AUTO

    def __post_init__(self) -> None:
        check_choices(self)
        check_whole("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_RANKS)
        check_positive("distributed_timeout_s", self.distributed_timeout_s)
        check_cpu_bind(self.cpu_bind, self.tensor_parallel_size)
        check_flag("enable_expert_parallel", self.enable_expert_parallel)
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(
                "enable_expert_parallel divides experts among ranks: tensor_parallel_size must be above 1, got 1",
                field="enable_expert_parallel",
            )


def check_served_by_ranks(options: dict[str, Any], size: int) -> None:
    """Refuse options that ranks do not serve.

    Args:
        options: values of the options of the names below.
        size: number of ranks.

    Raises:
        ConfigError: an option has another value than one that ranks serve; the message names both.
    """
    if size == 1:
        return
    fewest = min(map(len, cpu_lists(options["cpu_bind"]) or ()), default=MAX_CPU)
    if (options["num_threads"] or 1) > fewest:
        raise ConfigError(
            f"num_threads must be at most the number of cores of each rank in cpu_bind, which is {fewest}, got "
            f"{options['num_threads']}",
            field="num_threads",
        )
    for name, (served, why) in _SERVED.items():
        if options[name] not in served:
            words = " or ".join(repr(each) for each in served)
            raise ConfigError(
                f"{name} must be {words} with tensor_parallel_size above 1, got {options[name]!r}: {why}", field=name
            )


# Options with the values that ranks serve, and the reason why they do not serve others.
_SERVED: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    **dict.fromkeys(
        ("prefix_cache_url", "kv_transfer_config"),
        ((None,), "blocks from elsewhere would be loaded at other times on each rank"),
    ),
    "device": (("auto", "cpu"), "ranks exchange numbers between CPUs"),
}
