"""What was found when an engine starts: the machine, and what the model fixes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was found on the device once the weights are loaded.

    Args:
        device: "cpu" or "cuda".
        available_bytes: memory that a new allocation can take, limits of control groups included.
        num_threads: cores that this process may use.
        host_bytes: memory that a new allocation can take on the host, where the device has memory of its own; None
            where both are one.
        total_bytes: all the memory of a GPU, whoever uses it; None on a CPU.
    """

    device: str
    available_bytes: int
    num_threads: int
    host_bytes: int | None = None
    total_bytes: int | None = None

    def set_aside(self, tier_bytes: int, field: str) -> Machine:
        """Return the machine without the host memory that is for the host tier.

        Args:
            tier_bytes: of the tier.
            field: the option that asks for it.

        Raises:
            ConfigError: more is asked for than there is.
        """
        room = self.available_bytes if self.host_bytes is None else self.host_bytes
        if tier_bytes > room:
            raise ConfigError(
                f"{field} ({tier_bytes:,} bytes of host memory) is more than the {room:,} bytes available there once "
                "the weights are loaded; ask for less with swap_space",
                field=field,
            )
        if self.host_bytes is None:
            return replace(self, available_bytes=room - tier_bytes)
        return replace(self, host_bytes=room - tier_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Memory that a step takes besides weights and KV, at its worst.

    Args:
        fixed_bytes: whatever its sequences have in the cache.
        bytes_per_token: for each cached token of its sequences.
    """

    fixed_bytes: int = 0
    bytes_per_token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the model fixes.

    Args:
        max_position: the longest context that the model was made for, in tokens.
        bytes_per_token: KV bytes of one token, all layers.
        most_bytes: bytes of a pool that is never used up, by all seats with sequences of the context asked for; None
            where no layer keeps a state.
        vocab_size: rows of the output head.
        num_parameters: of the whole model.
        dtype: of the weights.
        kernels: what computes it, in words.
        longest_bytes: KV bytes of the smallest pool that holds a sequence of the context asked for, null blocks
            included; None where every layer keeps every token.
        concurrency: maps the blocks of a pool to the sequences of the context asked for that its memory lets run at
            once; None divides them by the blocks of one sequence.
        step: what a step takes; measured on a GPU.
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
    step: StepCost = StepCost()
