"""Eviction policies: a policy stores the order in which a pool's idle blocks are evicted.

Sequences release their blocks tail first, so under a policy that orders blocks by the time at which they became idle,
the tail of a chain is evicted before its head.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Protocol


class EvictionPolicy(Protocol):
    """The idle blocks of one pool and retention priority, in the order in which they would be evicted."""

    def add(self, block_ids: Sequence[int]) -> None:
        """Add blocks that have just become idle, one after the other."""

    def discard(self, block_ids: Sequence[int]) -> None:
        """Remove blocks that were hit."""

    def forget(self, block_ids: Sequence[int]) -> None:
        """Remove blocks that are no longer published, with their history."""

    def victims(self, count: int) -> list[int]:
        """Return the next `count` blocks to evict, in order; `count` is at most the number of idle blocks."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


# Makes an empty policy.
PolicyMaker = Callable[[], EvictionPolicy]

Rank = tuple[int, int]


class LowestRank:
    """Evicts the block of the lowest rank; a block gets its rank each time it becomes idle."""

    __slots__ = ("_clock", "_first", "_heap", "_hits", "_idle", "_rank")

    # Stale entries are dropped above this number of heap entries, in addition to four for each idle block.
    MOST_STALE = 4096

    def __init__(self, rank: Callable[[int, int, int], Rank]) -> None:
        self._rank = rank
        self._clock = 0
        self._first: dict[int, int] = {}
        self._hits: dict[int, int] = {}
        self._idle: dict[int, Rank] = {}
        # Stale ranks stay in the heap until they reach its top.
        self._heap: list[tuple[Rank, int]] = []

    def add(self, block_ids: Sequence[int]) -> None:
        """Add blocks that have just become idle."""
        for block_id in block_ids:
            self._clock += 1
            first = self._first.setdefault(block_id, self._clock)
            rank = self._idle[block_id] = self._rank(first, self._hits.get(block_id, 0), self._clock)
            heappush(self._heap, (rank, block_id))
        # A block that is hit leaves a stale entry, which may never reach the top of the heap.
        if len(self._heap) > 4 * len(self._idle) + self.MOST_STALE:
            self._heap = [(rank, block_id) for block_id, rank in self._idle.items()]
            heapify(self._heap)

    def discard(self, block_ids: Sequence[int]) -> None:
        """Remove blocks that were hit, and count the hits."""
        for block_id in block_ids:
            del self._idle[block_id]
            self._hits[block_id] = self._hits.get(block_id, 0) + 1

    def forget(self, block_ids: Sequence[int]) -> None:
        """Remove blocks with their history."""
        for block_id in block_ids:
            for record in (self._first, self._hits, self._idle):
                record.pop(block_id, None)

    def victims(self, count: int) -> list[int]:
        """Return the next blocks to evict, in order."""
        idle, heap = self._idle, self._heap
        chosen: list[tuple[Rank, int]] = []
        while len(chosen) < count:
            entry = heappop(heap)
            # The heap may have an entry twice: a block that was hit may become idle with its former rank.
            if idle.get(entry[1]) == entry[0] and entry not in chosen[-1:]:
                chosen.append(entry)
        for entry in chosen:
            heappush(heap, entry)
        return [block_id for _, block_id in chosen]

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._idle, key=self._idle.__getitem__))


class SegmentedLru:
    """Evicts blocks without a hit (probation) first; at most `PROTECTED_SHARE` of all idle blocks are protected."""

    __slots__ = ("_probation", "_protected", "_was_hit")

    PROTECTED_SHARE = 0.8

    def __init__(self) -> None:
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._was_hit: set[int] = set()

    def add(self, block_ids: Sequence[int]) -> None:
        """Add blocks that have just become idle; beyond the limit, the oldest protected block goes to probation."""
        for block_id in block_ids:
            (self._protected if block_id in self._was_hit else self._probation)[block_id] = None
            if len(self._protected) > self.PROTECTED_SHARE * len(self):
                oldest, _ = self._protected.popitem(last=False)
                self._was_hit.discard(oldest)
                self._probation[oldest] = None

    def discard(self, block_ids: Sequence[int]) -> None:
        """Remove blocks that were hit; they are protected when they become idle again."""
        for block_id in block_ids:
            del (self._protected if block_id in self._protected else self._probation)[block_id]
            self._was_hit.add(block_id)

    def forget(self, block_ids: Sequence[int]) -> None:
        """Remove blocks with their history."""
        for block_id in block_ids:
            self._protected.pop(block_id, None)
            self._probation.pop(block_id, None)
            self._was_hit.discard(block_id)

    def victims(self, count: int) -> list[int]:
        """Return the next blocks to evict, in order."""
        return list(islice(self, count))

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[int]:
        yield from self._probation
        yield from self._protected


def first_in_first_out() -> EvictionPolicy:
    """Evict the block that first became idle longest ago, however often it was hit since."""
    return LowestRank(lambda first, _hits, _now: (first, 0))


def least_frequently_used() -> EvictionPolicy:
    """Evict the block with the fewest hits, and of several the one that has been idle for longest."""
    return LowestRank(lambda _first, hits, now: (hits, now))


# By name; None is least recently used: `IdleQueue` already has the order in which blocks became idle.
EVICTION_POLICIES: dict[str, PolicyMaker | None] = {
    "lru": None,
    "fifo": first_in_first_out,
    "lfu": least_frequently_used,
    "slru": SegmentedLru,
}
