"""How long blocks live, lie idle and wait to be hit again: clocks on a sample of the blocks."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from quire.memory.pool.pool import BlockPool

# Seconds. A block may be hit again within a step, and rest for days.
BOUNDS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0),
    *(1_000.0, 2_000.0, 5_000.0, 10_000.0, 20_000.0, 50_000.0, 100_000.0),
)
# However small the share: of a small pool it would be no block at all.
MIN_SAMPLED = 16


class TimeHistogram:
    """A histogram of times.

    Attributes:
        counts: for each bound, the times that are no longer and longer than the bound before; the last for all beyond.
        sum_s: of all times.
        longest_s: of all times.
    """

    __slots__ = ("counts", "longest_s", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0
        self.longest_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a time."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds
        self.longest_s = max(self.longest_s, seconds)

    def summary(self) -> TimeSummary:
        """Return what a person wants to know."""
        counts = tuple(self.counts)
        num_times = sum(counts)
        return TimeSummary(
            num_times, self.sum_s / max(1, num_times), self._at_most(counts, 0.5), self._at_most(counts, 0.9)
        )

    def _at_most(self, counts: Sequence[int], share: float) -> float:
        """Return a bound that a share of the times keeps."""
        wanted, seen = share * sum(counts), 0
        for bound, count in zip(BOUNDS_S, counts, strict=False):
            seen += count
            if seen >= wanted:
                return min(bound, self.longest_s)
        return self.longest_s


class TimeSummary(NamedTuple):
    """Times in short.

    Args:
        num_times: how many there were.
        mean_s: 0 without any.
        p50_s: half of them are no longer.
        p90_s: nine in ten of them are no longer.
    """

    num_times: int
    mean_s: float
    p50_s: float
    p90_s: float


class BlockLifetimes:
    """Watches a sample of the blocks: always the same ids, evenly spread.

    Args:
        pools: of all cache groups; they tell this object from now on.
        share: of the blocks, above 0.
        clock: seconds, monotonic.

    Attributes:
        lifetime: from when a block was taken until it was evicted.
        idle: how long it had been idle by then.
        reuse_gap: how long blocks had been idle when they were hit again.
    """

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
        """Return each kind of time in short, by name."""
        return {
            "lifetime": self.lifetime.summary(),
            "idle_before_evict": self.idle.summary(),
            "reuse_gap": self.reuse_gap.summary(),
        }


class PoolLifetimes:
    """Stamps the sampled blocks of one pool.

    Args:
        lifetimes: takes the times.
        sample: ids of the blocks.
        clock: seconds, monotonic.
    """

    __slots__ = ("_clock", "_idle_since", "_lifetimes", "_sample", "_taken_at")

    def __init__(self, lifetimes: BlockLifetimes, sample: frozenset[int], clock: Callable[[], float]) -> None:
        self._lifetimes = lifetimes
        self._sample = sample
        self._clock = clock
        self._taken_at: dict[int, float] = {}
        self._idle_since: dict[int, float] = {}

    def on_allocate(self, block_ids: Sequence[int]) -> None:
        """Note a birth."""
        for block_id in self._sample.intersection(block_ids):
            self._taken_at[block_id] = self._clock()

    def on_reuse(self, block_ids: Sequence[int]) -> None:
        """Note a hit."""
        for block_id in self._sample.intersection(block_ids):
            self._lifetimes.reuse_gap.add(self._clock() - self._idle_since[block_id])

    def on_idle(self, block_ids: Sequence[int]) -> None:
        """Note the last use."""
        for block_id in self._sample.intersection(block_ids):
            self._idle_since[block_id] = self._clock()

    def on_evict(self, block_ids: Sequence[int]) -> None:
        """Note an end."""
        for block_id in self._sample.intersection(block_ids):
            now_s = self._clock()
            self._lifetimes.idle.add(now_s - self._idle_since[block_id])
            if block_id in self._taken_at:
                self._lifetimes.lifetime.add(now_s - self._taken_at[block_id])

    def on_move(self, src_id: int, dst_id: int) -> None:
        """Forget the birth of what is somewhere else now: it would not be of one sampled block."""
        self._taken_at.pop(src_id, None)
        self._taken_at.pop(dst_id, None)
