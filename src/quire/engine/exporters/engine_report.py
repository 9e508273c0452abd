"""Report of a running engine: health, memory and totals, read together for one server response."""

from __future__ import annotations

from typing import Any, NamedTuple

from quire.engine.exporters.kv_report import KvReport
from quire.engine.metrics.stats import EngineStats, Health
from quire.memory.usage import Usage


class EngineReport(NamedTuple):
    """State of an engine, possibly in the middle of a step.

    Args:
        health: whether it makes progress.
        usage: counts of the memory manager.
        stats: totals since the start.
        kv: pinned and retained blocks, and the lifetimes of blocks.
        swapped_requests: ids of the requests with a sequence whose blocks are on the host.
        kv_event_source: address and format of the engine's KV events; None where it publishes none.
    """

    health: Health
    usage: Usage
    stats: EngineStats
    kv: KvReport
    swapped_requests: frozenset[str]
    kv_event_source: dict[str, Any] | None
