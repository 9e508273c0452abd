"""The published blocks of a pool without holders, in the order in which they are evicted.

```
 evicted first   LOW      blocks that left a window, and snapshots before a later one
                 DEFAULT  blocks of ended sequences
 evicted last    HIGH     blocks of ended sequences with `retain_cache`
```

Blocks of one retention priority are evicted in the order of the eviction policy; blocks of priority `LOW` by age under
every policy. Until then all of them can be hit. The arena orders the blocks of several groups by priority, then by age.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from quire.memory.pool.eviction import EvictionPolicy, PolicyMaker
from quire.memory.pool.idle_queue import IdleQueue, Ticker
from quire.memory.pool.retention import Retention


class RetentionPriority(IntEnum):
    """The retention priority of an idle block: blocks of lower priority are evicted first."""

    LOW = 0
    DEFAULT = 1
    HIGH = 2


# Looking a member up in its enumeration takes as long as a call.
_LOW, _DEFAULT, _HIGH = RetentionPriority

# The retention priority of an idle block and the tick at which it became idle, in one int: the lowest is evicted first.
Age = int
_PRIORITY_STEP = 1 << 62


def ages_of(priority: int, moments: Iterable[int]) -> list[Age]:
    """Return the ages of blocks of one retention priority that became idle at the ticks `moments`."""
    base = priority * _PRIORITY_STEP
    return [base + moment for moment in moments]


class Part(NamedTuple):
    """Blocks of one retention priority.

    Args:
        priority: retention priority of all blocks.
        block_ids: the blocks.
        moments: tick at which each block became idle.
    """

    priority: RetentionPriority
    block_ids: Sequence[int]
    moments: Sequence[int] = ()


class IdleBlocks:
    """The idle blocks of one pool."""

    __slots__ = ("_count", "_group_idx", "_hints", "_orders", "_retention", "queues")

    def __init__(self, policy: PolicyMaker | None, clock: Ticker, retention: Retention, group_idx: int) -> None:
        self.queues = tuple(IdleQueue(clock) for _ in RetentionPriority)
        self._orders: tuple[EvictionPolicy | None, ...] = (None, policy and policy(), policy and policy())
        self._count = 0
        self._retention = retention
        self._group_idx = group_idx
        self._hints = retention.of_group[group_idx]

    def add(self, block_ids: Sequence[int], priority: RetentionPriority, moments: Sequence[int]) -> list[Part]:
        """Add blocks that have just become idle, one after the other."""
        self._count += len(block_ids)
        parts = [Part(priority, block_ids, moments)]
        if self._hints:
            if priority is _LOW:
                self._retention.drop(self._group_idx, block_ids)
            else:
                parts = self._split_by_hint(block_ids, moments)
        for part in parts:
            self.queues[part.priority].add(part.block_ids, part.moments)
            order = self._orders[part.priority]
            if order is not None:
                order.add(part.block_ids)
        return parts

    def discard(self, block_ids: Sequence[int]) -> list[Part]:
        """Remove blocks that were hit; return them by retention priority."""
        self._count -= len(block_ids)
        parts = self._split(block_ids)
        for part in parts:
            self.queues[part.priority].discard(part.block_ids)
            order = self._orders[part.priority]
            if order is not None:
                order.discard(part.block_ids)
        return parts

    def remove(self, block_ids: Sequence[int]) -> list[Part]:
        """Remove blocks that are no longer published; return them by retention priority."""
        self._count -= len(block_ids)
        parts = self._split(block_ids)
        for part in parts:
            self.queues[part.priority].discard(part.block_ids)
        self.forget(block_ids)
        return parts

    def forget(self, block_ids: Sequence[int]) -> None:
        """Forget the hit counts and retention hints of blocks that are not idle."""
        for order in self._orders:
            if order is not None:
                order.forget(block_ids)
        if self._hints:
            self._retention.drop(self._group_idx, block_ids)

    def victims(self, count: int) -> list[int]:
        """Return the blocks that are evicted next, in order; at most as many as are idle."""
        chosen: list[int] = []
        for queue, order in zip(self.queues, self._orders, strict=True):
            most = min(count - len(chosen), len(queue))
            if most:
                chosen += queue.oldest(most) if order is None else order.victims(most)
        return chosen

    def ages_of_victims(self, count: int) -> list[Age]:
        """Return the ages of the blocks that are evicted next, in that order."""
        ages: list[Age] = []
        for priority, (queue, order) in enumerate(zip(self.queues, self._orders, strict=True)):
            most = min(count - len(ages), len(queue))
            if most:
                moments = queue.oldest_moments(most) if order is None else queue.since(order.victims(most))
                ages += ages_of(priority, moments)
        return ages

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block_id: int) -> bool:
        return any(block_id in queue for queue in self.queues)

    def __iter__(self) -> Iterator[int]:
        for queue, order in zip(self.queues, self._orders, strict=True):
            yield from queue if order is None else order

    def _split(self, block_ids: Sequence[int]) -> list[Part]:
        """Return idle blocks by retention priority."""
        low, default, high = self.queues
        if not low and not high:
            return [Part(_DEFAULT, block_ids)] if block_ids else []
        parts, num_left = [], len(block_ids)
        for priority, queue in ((_DEFAULT, default), (_LOW, low), (_HIGH, high)):
            members = queue.members(block_ids) if num_left and queue else ()
            if members:
                parts.append(Part(priority, members))
                num_left -= len(members)
        return parts

    def _split_by_hint(self, block_ids: Sequence[int], moments: Sequence[int]) -> list[Part]:
        hints = self._hints
        if hints.isdisjoint(block_ids):
            return [Part(_DEFAULT, block_ids, moments)]
        parts = []
        for priority, is_hinted in ((_DEFAULT, False), (_HIGH, True)):
            members = [pair for pair in zip(block_ids, moments, strict=True) if (pair[0] in hints) is is_hinted]
            if members:
                parts.append(Part(priority, *map(list, zip(*members, strict=True))))
        return parts
