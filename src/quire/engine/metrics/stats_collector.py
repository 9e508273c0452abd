"""Reads the counters of an engine: their totals since the start, and their changes in each step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from itertools import chain, repeat
from operator import attrgetter, sub
from typing import Any

from quire.engine.metrics.stats import EngineStats, StepStats
from quire.memory.results import NO_TOKENS
from quire.memory.usage import HostUsage, used_fraction
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.stats import SchedulerStats

# Names of the scalar counters: the fields of the scheduler's stats with default 0, and the engine's own.
SCHEDULER_COUNTERS = tuple(field.name for field in fields(SchedulerStats) if field.default == 0)
COUNTERS = (*SCHEDULER_COUNTERS, "prompt_tokens", "generation_tokens", "swap_out_blocks", "swap_in_blocks")
read_scheduler_counters = attrgetter(*SCHEDULER_COUNTERS)


class StatsCollector:
    """Reads the counters of scheduler and memory, and holds the engine's own."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.computed_tokens = 0
        self._measured_tokens = 0
        self._scheduler = scheduler
        self._counted: tuple[int, ...] = (0,) * len(COUNTERS)
        self._accounts = (NO_TOKENS, NO_TOKENS)
        self._by_position: list[int] = []
        self._has_host = scheduler.memory.usage().host is not None

    def totals(self, num_steps: int) -> EngineStats:
        """Return the totals since the start."""
        usage, stats = self._scheduler.memory.usage(), self._scheduler.stats
        return EngineStats(
            **_by_name(self._count(usage.host)),
            first_time=stats.first_time,
            resumed=stats.resumed,
            accepted_by_position=stats.accepted_by_position.copy(),
            num_steps=num_steps,
            computed_tokens=self.computed_tokens,
            num_evictions=usage.num_evictions,
            num_copies=usage.num_copies,
            num_merges=usage.num_merges,
        )

    def measure(self, now_s: float) -> StepStats:
        """Return the engine's state, and the counters' changes since the last call."""
        scheduler = self._scheduler
        stats, host = scheduler.stats, scheduler.memory.usage().host if self._has_host else None
        counted, self._counted = self._counted, self._count(host)
        accounts, self._accounts = self._accounts, (stats.first_time, stats.resumed)
        step_tokens, self._measured_tokens = self.computed_tokens - self._measured_tokens, self.computed_tokens
        by_position, self._by_position = self._by_position, stats.accepted_by_position.copy()
        return StepStats(
            **_by_name(map(sub, self._counted, counted)),
            first_time=stats.first_time.minus(accounts[0]),
            resumed=stats.resumed.minus(accounts[1]),
            accepted_by_position=list(map(sub, self._by_position, chain(by_position, repeat(0)))),
            now_s=now_s,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_swapped=len(scheduler.swapped),
            kv_usage=used_fraction(scheduler.memory.arena),
            host_usage=host.used_bytes / host.num_bytes if host else 0.0,
            step_tokens=step_tokens,
        )

    def _count(self, host: HostUsage | None) -> tuple[int, ...]:
        """Return the values of `COUNTERS` since the start."""
        swaps = (host.num_swap_outs, host.num_swap_ins) if host else (0, 0)
        return (*read_scheduler_counters(self._scheduler.stats), self.prompt_tokens, self.generation_tokens, *swaps)


def _by_name(values: Iterable[int]) -> dict[str, Any]:
    return dict(zip(COUNTERS, values, strict=True))
