"""Counts what an engine does: totals since the start, and what each step added to them."""

from __future__ import annotations

from itertools import chain, repeat
from operator import sub

from quire.engine.stats import EngineStats, StepStats, Totals
from quire.execution.prefix_store import StoreStats
from quire.memory.status import NO_TOKENS
from quire.memory.usage import used_fraction
from quire.scheduling.scheduler import Scheduler


class Meter:
    """Reads the counters of scheduler and memory, and keeps the engine's own.

    Args:
        scheduler: the engine's.

    Attributes:
        prompt_tokens: of the requests that were let in.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.prompt_tokens = 0
        self._generation_tokens = 0
        self._computed_tokens = 0
        self._scheduler = scheduler
        self._counted = Totals(*(0 for _ in Totals._fields))
        self._accounts = (NO_TOKENS, NO_TOKENS)
        self._by_position: list[int] = []
        self._has_host = scheduler.memory.usage().host is not None

    def totals(self, num_steps: int, disk: StoreStats | None) -> EngineStats:
        """Return the totals since the start.

        Args:
            num_steps: steps of the engine.
            disk: what the prefix cache on disk counted, None without one.
        """
        usage, stats = self._scheduler.memory.usage(), self._scheduler.stats
        return EngineStats(
            num_steps=num_steps,
            num_preemptions=stats.num_preemptions,
            num_swaps=stats.num_swaps,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            resumed_queries=stats.resumed_queries,
            resumed_hits=stats.resumed_hits,
            wasted_tokens=stats.wasted_tokens,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self._generation_tokens,
            computed_tokens=self._computed_tokens,
            num_copies=usage.num_copies,
            num_evictions=usage.num_evictions,
            num_merges=usage.num_merges,
            first_time=stats.first_time,
            resumed=stats.resumed,
            disk=disk,
            num_drafts=stats.num_drafts,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
        )

    def measure(self, now_s: float, num_generated: int, step_tokens: int) -> StepStats:
        """Return the levels as they are, and what was counted since the last call.

        Args:
            now_s: seconds of the engine's clock.
            num_generated: tokens that the step sampled.
            step_tokens: tokens that the step computed.
        """
        scheduler = self._scheduler
        stats, host = scheduler.stats, scheduler.memory.usage().host if self._has_host else None
        now = Totals(
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            num_preemptions=stats.num_preemptions,
            num_swaps=stats.num_swaps,
            wasted_tokens=stats.wasted_tokens,
            swap_out_blocks=host.num_swap_outs if host else 0,
            swap_in_blocks=host.num_swap_ins if host else 0,
            prompt_tokens=self.prompt_tokens,
            num_drafts=stats.num_drafts,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
        )
        added = Totals(*(new - old for new, old in zip(now, self._counted, strict=True)))
        self._counted = now
        earlier, self._accounts = self._accounts, (stats.first_time, stats.resumed)
        first_time, resumed = (new.minus(old) for new, old in zip(self._accounts, earlier, strict=True))
        by_position, self._by_position = self._by_position, stats.accepted_by_position.copy()
        self._generation_tokens += num_generated
        self._computed_tokens += step_tokens
        return StepStats(
            now_s=now_s,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_swapped=len(scheduler.swapped),
            kv_usage=used_fraction(scheduler.memory.arena),
            host_usage=host.used_bytes / host.num_bytes if host else 0.0,
            generation_tokens=num_generated,
            step_tokens=step_tokens,
            **added._asdict(),
            first_time=first_time,
            resumed=resumed,
            accepted_by_position=tuple(map(sub, self._by_position, chain(by_position, repeat(0)))),
        )
