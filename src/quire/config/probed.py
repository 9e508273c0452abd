"""Properties of the machine and of the model, found when an engine starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine after the weights are loaded.

    Args:
        device: "cpu" or "cuda".
        available_bytes: memory of the device that can still be allocated, within the limits of control groups.
        num_threads: number of cores that this process may use.
        host_bytes: host memory that can still be allocated, if the device is a GPU; None on a CPU.
        total_bytes: total memory of a GPU; None on a CPU.
    """

    device: str
    available_bytes: int
    num_threads: int
    host_bytes: int | None = None
    total_bytes: int | None = None

    def set_aside(self, tier_bytes: int, field: str) -> Machine:
        """Return the machine without the memory of the host tier."""
        available = self.available_bytes if self.host_bytes is None else self.host_bytes
        if tier_bytes > available:
            raise ConfigError(
                f"{field} ({tier_bytes:,} bytes of host memory) is more than the {available:,} bytes "
                "available; set a smaller swap_space",
                field=field,
            )
        if self.host_bytes is None:
            return replace(self, available_bytes=available - tier_bytes)
        return replace(self, host_bytes=available - tier_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Maximum memory of a step in addition to weights and KV cache.

    Args:
        fixed_bytes: part that does not depend on the cached tokens.
        bytes_per_token: bytes per cached token of the step's sequences.
        image_bytes: memory of the largest image in its encoder, between steps, and of features that are kept; in
            addition to that of a step.
    """

    fixed_bytes: int = 0
    bytes_per_token: int = 0
    image_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Properties of the model.

    Args:
        max_position: longest context that the model supports, in tokens.
        bytes_per_token: KV bytes of one token in all layers.
        most_bytes: bytes of a pool that `max_num_seqs` sequences of `max_model_len` tokens cannot exhaust; None if no
            layer has a recurrent state.
        vocab_size: number of rows of the output head.
        num_parameters: number of parameters of the whole model.
        dtype: dtype of the weights.
        kernels: description of the kernels in use.
        longest_bytes: KV bytes of the smallest pool that holds a sequence of `max_model_len` tokens, including null
            blocks; None if every layer caches every token.
        concurrency: function from a number of blocks to the number of sequences of `max_model_len` tokens that can run
            at once; None divides by the blocks of one sequence.
        host_blocks: function from the bytes of a host tier to its number of blocks without null blocks (with several
            cache groups: slabs); None divides by the bytes of a block.
        step: memory of a step; measured on a GPU.
        is_encoder: True for a model without a KV cache, which computes a prompt in one step and generates nothing.
        hosted: differences from a family, if modules of transformers compute the model; empty for a family.
    """

    max_position: int
    bytes_per_token: int
    vocab_size: int
    num_parameters: int
    dtype: str = "bfloat16"
    kernels: str = "torch"
    most_bytes: int | None = None
    longest_bytes: int | None = None
    concurrency: Callable[[int], int] | None = None
    host_blocks: Callable[[int], int] | None = None
    step: StepCost = StepCost()
    is_encoder: bool = False
    hosted: tuple[str, ...] = ()
