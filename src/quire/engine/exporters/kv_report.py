"""Report of a running engine's pinned and retained blocks, and of the lifetimes of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from quire.engine.kv.pinning import PinReport
from quire.engine.metrics.block_lifetimes import TimeSummary

if TYPE_CHECKING:  # a process that only shows reports does not import torch
    from quire.engine.engine import Engine


class KvReport(NamedTuple):
    """Pinned and retained blocks, and the lifetimes of blocks.

    Args:
        pins: pinned prefixes.
        retained_bytes: bytes of the blocks that are to be evicted last.
        retention_limit_bytes: limit of `retained_bytes`.
        residency: summaries of the times of sampled blocks, by name; None if no block is sampled.
    """

    pins: PinReport
    retained_bytes: int
    retention_limit_bytes: int
    residency: dict[str, TimeSummary] | None

    @classmethod
    def of(cls, engine: Engine) -> KvReport:
        """Return the report of an engine; thread-safe."""
        retention = engine.scheduler.memory.arena.retention
        residency = None if engine.block_lifetimes is None else engine.block_lifetimes.summary()
        return cls(engine.pins.report(), retention.num_bytes, retention.limit_bytes, residency)
