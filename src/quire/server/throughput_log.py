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
    """

    at_s: float
    totals: EngineStats
    num_running: int
    num_waiting: int
    kv_usage: float

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
        )


def report(before: Sample, after: Sample) -> str | None:
    """Return the line for the time between two samples, None where nothing happened."""
    old, new = before.totals, after.totals
    num_prompt = new.prompt_tokens - old.prompt_tokens
    num_generated = new.generation_tokens - old.generation_tokens
    if not (num_prompt or num_generated or after.num_running or after.num_waiting):
        return None
    seconds = after.at_s - before.at_s
    num_queries = new.prefix_queries - old.prefix_queries
    hits = f"{(new.prefix_hits - old.prefix_hits) / num_queries:.1%}" if num_queries else "no queries"
    return (
        f"Throughput: prompt {num_prompt / seconds:.1f} tokens/s, generation {num_generated / seconds:.1f} tokens/s; "
        f"running {after.num_running}, waiting {after.num_waiting}; KV cache usage {after.kv_usage:.1%}; "
        f"prefix cache hit rate {hits}"
    )


async def log_throughput(llm: AsyncLLM, interval_s: float) -> None:
    """Log a line at each interval in which something happened."""
    before = Sample.of(llm)
    while True:
        await asyncio.sleep(interval_s)
        after = Sample.of(llm)
        line = report(before, after)
        before = after
        if line is not None:
            logger.info(line)
