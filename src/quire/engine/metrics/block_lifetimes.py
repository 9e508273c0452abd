"""Lifetimes, idle times and reuse gaps of a sample of the blocks."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from quire.memory.pool.pool import BlockPool

# Bucket bounds in seconds. A block may be hit again within a step, or stay idle for days.
BOUNDS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0),
    *(1_000.0, 2_000.0, 5_000.0, 10_000.0, 20_000.0, 50_000.0, 100_000.0),
)
# Least number of sampled blocks of a pool: a small share of a small pool could be less than one block.
MIN_SAMPLED = 16


class TimeHistogram:
    """A histogram of times."""

    __slots__ = ("counts", "longest_s", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0
        self.longest_s = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a time, or several equal ones."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += count
        self.sum_s += seconds * count
        self.longest_s = max(self.longest_s, seconds)

    def summary(self) -> TimeSummary:
        """Return the number, the mean, and percentiles of the times."""
        counts = tuple(self.counts)
        num_times = sum(counts)
        return TimeSummary(
            num_times, self.sum_s / max(1, num_times), self._at_most(counts, 0.5), self._at_most(counts, 0.9)
        )

    def _at_most(self, counts: Sequence[int], share: float) -> float:
        """Return an upper bound for a share of the times."""
        wanted, seen = share * sum(counts), 0
        for bound, count in zip(BOUNDS_S, counts, strict=False):
            seen += count
            if seen >= wanted:
                return min(bound, self.longest_s)
        return self.longest_s


class TimeSummary(NamedTuple):
    """Summary of a histogram.

    Args:
        num_times: number of times.
        mean_s: mean time, 0 without any.
        p50_s: upper bound of the median.
        p90_s: upper bound of the 90th percentile.
    """

    num_times: int
    mean_s: float
    p50_s: float
    p90_s: float


class BlockLifetimes:
    """Measures a sample of the blocks: always the same ids, evenly spread."""

    def __init__(self, pools: Iterable[BlockPool], share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.lifetime, self.idle, self.reuse_gap = TimeHistogram(), TimeHistogram(), TimeHistogram()
        self.num_sampled = 0
        for pool in pools:
            num_blocks = len(pool.ref_counts) - 1
            stride = max(1, min(round(1 / share), num_blocks // MIN_SAMPLED))
            sample = frozenset(range(1 + (stride - 1) // 2, num_blocks + 1, stride))
            self.num_sampled += len(sample)
            pool.observer = PoolLifetimes(self, sample, clock)

    def summary(self) -> dict[str, TimeSummary]:
        """Return the summary of each histogram, by name."""
        return {
            "lifetime": self.lifetime.summary(),
            "idle_before_evict": self.idle.summary(),
            "reuse_gap": self.reuse_gap.summary(),
        }


class PoolLifetimes:
    """Observer of the sampled blocks of one pool."""

    __slots__ = ("_clock", "_idle_since", "_lifetimes", "_taken_at", "sample")

    def __init__(self, lifetimes: BlockLifetimes, sample: frozenset[int], clock: Callable[[], float]) -> None:
        self._lifetimes = lifetimes
        self.sample = sample
        self._clock = clock
        self._taken_at: dict[int, float] = {}
        self._idle_since: dict[int, float] = {}

    def on_allocate(self, block_ids: Sequence[int]) -> None:
        """Record the time of allocation."""
        for block_id in self.sample.intersection(block_ids):
            self._taken_at[block_id] = self._clock()

    def on_reuse(self, block_ids: Sequence[int]) -> None:
        """Count the reuse gap of a hit."""
        for block_id in self.sample.intersection(block_ids):
            self._lifetimes.reuse_gap.add(self._clock() - self._idle_since[block_id])

    def on_idle(self, block_ids: Sequence[int]) -> None:
        """Record the time of the last use."""
        for block_id in self.sample.intersection(block_ids):
            self._idle_since[block_id] = self._clock()

    def on_evict(self, block_ids: Sequence[int]) -> None:
        """Count the idle time and the lifetime of evicted blocks."""
        for block_id in self.sample.intersection(block_ids):
            now_s = self._clock()
            self._lifetimes.idle.add(now_s - self._idle_since[block_id])
            if block_id in self._taken_at:
                self._lifetimes.lifetime.add(now_s - self._taken_at[block_id])

    def on_move(self, src_id: int, dst_id: int) -> None:
        """Forget the allocation of moved contents: their lifetime would span two block ids."""
        self._taken_at.pop(src_id, None)
        self._taken_at.pop(dst_id, None)
