"""The log line with the engine's throughput, every few seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.metrics.stats import EngineStats

logger = logging.getLogger(__name__)


class Sample(NamedTuple):
    """Totals and levels of the engine at one moment.

    Args:
        at_s: time of the sample, in seconds of a monotonic clock.
        totals: counters since the engine's start.
        kv_usage: share of the KV blocks in use, from 0 to 1.
        step_s: seconds since the last step ended, or since the engine was idle.
    """

    at_s: float
    totals: EngineStats
    num_running: int
    num_waiting: int
    kv_usage: float
    num_swapped: int = 0
    step_s: float = 0.0

    @classmethod
    def of(cls, llm: AsyncLLM) -> Sample:
        """Take a sample of an engine."""
        health = llm.health()
        return cls(
            at_s=time.monotonic(),
            totals=llm.stats(),
            num_running=health.num_running,
            num_waiting=health.num_waiting,
            kv_usage=llm.usage().used_fraction,
            num_swapped=health.num_swapped,
            step_s=health.seconds_since_progress,
        )


def report(before: Sample, after: Sample) -> str | None:
    """Return the line for the time between two samples; None if nothing happened."""
    old, new = before.totals, after.totals
    num_prompt = new.prompt_tokens - old.prompt_tokens
    num_generated = new.generation_tokens - old.generation_tokens
    # Unlike the two above: without tokens of the cache, and with those that are computed again after a preemption.
    num_computed = new.computed_tokens - old.computed_tokens
    if not (num_prompt or num_generated or num_computed or after.num_running or after.num_waiting or after.num_swapped):
        return None
    seconds = after.at_s - before.at_s
    num_queries = new.prefix_queries - old.prefix_queries
    hits = f"{(new.prefix_hits - old.prefix_hits) / num_queries:.1%}" if num_queries else "no queries"
    # A step of a long prompt may take longer than the time between two samples.
    present = f"; the present step has run for {after.step_s:.0f} s" if after.num_running and not num_computed else ""
    return (
        f"Throughput: prompt {num_prompt / seconds:.1f} tokens/s, generation {num_generated / seconds:.1f} tokens/s, "
        f"computed {num_computed / seconds:.1f} tokens/s; "
        f"running {after.num_running}, waiting {after.num_waiting}, swapped {after.num_swapped}; "
        f"KV cache usage {after.kv_usage:.1%}; prefix cache hit rate {hits}{present}"
    )


def preemption_warning(before: Sample, now: Sample, *, is_going_on: bool) -> str | None:
    """Return the warning that preemption begins; None without preemptions in between, or if it `is_going_on`."""
    num_preemptions = now.totals.num_preemptions - before.totals.num_preemptions
    if not num_preemptions or is_going_on:
        return None
    num_swaps = now.totals.num_swaps - before.totals.num_swaps
    return (
        f"Preemption begins: the KV cache is full, so {num_preemptions} sequences lost their memory ({num_swaps} "
        f"swapped out, the others are computed again) and {now.num_swapped} are swapped out now; fewer requests at "
        "once (--max-num-seqs) or more KV memory avoids it"
    )


async def log_throughput(llm: AsyncLLM, interval_s: float) -> None:
    """Log a line at each interval in which something happened."""
    before, is_going_on = Sample.of(llm), False
    while True:
        await asyncio.sleep(interval_s)
        after = Sample.of(llm)
        warning = preemption_warning(before, after, is_going_on=is_going_on)
        is_going_on = after.totals.num_preemptions > before.totals.num_preemptions
        if warning is not None:
            logger.warning(warning)
        line = report(before, after)
        before = after
        if line is not None:
            logger.info(line)
