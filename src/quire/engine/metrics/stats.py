"""Statistics of an engine: counters and state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple, Self

from quire.distributed.kvstore.counters import RemoteStats, StoreStats, TransferStats
from quire.execution.step.image_features import ImageStats
from quire.scheduling.stats import Metric, SchedulerStats


@dataclass(slots=True)
class EngineCounters(SchedulerStats):
    """Counters of an engine, including its scheduler's."""

    # `_fields`, `_replace` and `_asdict` are as in a named tuple.
    _fields: ClassVar[tuple[str, ...]]

    prompt_tokens: Annotated[
        int,
        Metric(
            "Prompt tokens that steps have computed, or found in the prefix cache before these; each once, whatever n "
            "is, and not again after a preemption.",
            "prompt_tokens",
        ),
    ] = 0
    generation_tokens: Annotated[int, Metric("Generated tokens.", "generation_tokens")] = 0
    swap_out_blocks: Annotated[int, Metric("Blocks swapped out for preempted sequences.", "swap_out_blocks")] = 0
    swap_in_blocks: Annotated[int, Metric("Blocks swapped in for resumed sequences.", "swap_in_blocks")] = 0

    def _replace(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def _asdict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}


@dataclass(slots=True)
class StepStats(EngineCounters):
    """Statistics of one step: the changes of the counters, and the engine's state at its end."""

    now_s: Annotated[float, Metric("End of the step, in seconds of a monotonic clock.")] = 0.0
    num_running: Annotated[int, Metric("Running sequences.", "num_requests_running", "gauge")] = 0
    num_waiting: Annotated[int, Metric("Waiting requests.", "num_requests_waiting", "gauge")] = 0
    num_swapped: Annotated[int, Metric("Sequences swapped out to the host.", "num_requests_swapped", "gauge")] = 0
    kv_usage: Annotated[
        float, Metric("Share of the KV cache blocks in use, from 0 to 1.", "kv_cache_usage_perc", "gauge")
    ] = 0.0
    host_usage: Annotated[
        float, Metric("Share of the swap space in use, from 0 to 1.", "cpu_cache_usage_perc", "gauge")
    ] = 0.0
    step_tokens: Annotated[int, Metric("Computed tokens per step.", "iteration_tokens_total", "histogram")] = 0


@dataclass(slots=True)
class EngineStats(EngineCounters):
    """Counters since the start of an engine."""

    num_steps: Annotated[int, Metric("Steps of the engine.")] = 0
    computed_tokens: Annotated[int, Metric("Tokens that went through the model.")] = 0
    num_evictions: Annotated[
        int, Metric("Evicted blocks of the prefix cache.", "kv_block_evictions", kv_key="evictions")
    ] = 0
    num_copies: Annotated[int, Metric("Blocks copied on write.", "kv_block_copies", kv_key="copies")] = 0
    num_merges: Annotated[
        int, Metric("Full blocks freed as duplicates of published ones.", "kv_block_merges", kv_key="merges")
    ] = 0
    disk: Annotated[StoreStats | None, Metric("Counters of the prefix cache on disk; None without one.")] = None
    transfer: Annotated[TransferStats | None, Metric("Counters of KV transfer; None without it.")] = None
    remote: Annotated[RemoteStats | None, Metric("Counters of the remote prefix cache; None without one.")] = None
    images: Annotated[ImageStats | None, Metric("Counters of images; None without an encoder of them.")] = None


StepStats._fields, EngineStats._fields = StepStats.__match_args__, EngineStats.__match_args__


class Health(NamedTuple):
    """Whether the engine makes progress.

    Args:
        is_alive: True while its thread runs.
        is_stuck: True if it has work, but has not completed a step for a minute.
        seconds_since_progress: seconds since the last step or idle moment.
        num_swapped: number of sequences whose blocks are on the host.
    """

    is_alive: bool
    is_stuck: bool
    seconds_since_progress: float
    num_running: int
    num_waiting: int
    num_steps: int
    num_swapped: int = 0
