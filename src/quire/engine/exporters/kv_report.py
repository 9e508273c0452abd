"""What is known of the blocks of a running engine beside their counts."""

from __future__ import annotations

from typing import NamedTuple

from quire.engine.engine import Engine
from quire.engine.kv.pinning import PinReport
from quire.engine.metrics.block_lifetimes import TimeSummary


class KvReport(NamedTuple):
    """Which blocks are kept, and how long blocks live.

    Args:
        pins: what is held by name.
        retained_bytes: bytes of the blocks that are to be evicted last.
        retention_limit_bytes: the most that they may be.
        residency: times of a sample of the blocks, by name; None where none is measured.
    """

    pins: PinReport
    retained_bytes: int
    retention_limit_bytes: int
    residency: dict[str, TimeSummary] | None

    @classmethod
    def of(cls, engine: Engine) -> KvReport:
        """Look at an engine now, from any thread."""
        retention = engine.scheduler.memory.arena.retention
        residency = None if engine.block_lifetimes is None else engine.block_lifetimes.summary()
        return cls(engine.pins.report(), retention.num_bytes, retention.limit_bytes, residency)
