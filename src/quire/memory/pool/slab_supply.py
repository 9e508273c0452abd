"""The slabs of an arena: the free slabs, and the protocol of the slabs that a group has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.memory.pool.idle_blocks import Age, ages_of
from quire.memory.pool.idle_queue import IdleQueue, Ticker
from quire.memory.pool.pool import BlockPool
from quire.memory.pool.protocols import BlockSource
from quire.memory.pool.slab_layout import SlabLayout
from quire.memory.results import BlockCopy, Tier


@dataclass(slots=True, eq=False)
class SlabSupply:
    """The state that all groups of an arena share.

    Args:
        layout: layout of the arena's bytes.
        free: slabs that no group has, a stack.
        moves: copies of moved blocks, whose old ids are still in block tables, and of evicted blocks; `BlockTables`
            empties it. The arenas of all tiers share one list, since the order of the copies matters.
        tier: tier of the bytes.
        clock: clock of the pools.
    """

    layout: SlabLayout
    free: list[int]
    moves: list[BlockCopy]
    tier: Tier
    clock: Ticker

    def num_slabs_for(self, group_idx: int, num_blocks: int) -> int:
        """Return the number of slabs that blocks of a group fill."""
        return -(-num_blocks // self.layout.blocks_per_slab[group_idx])


class Reclaim(Protocol):
    """`Arena.reclaim`."""

    def __call__(self, group_idx: int, num_blocks: int, /) -> None: ...


class GroupSlabs(BlockSource, Protocol):
    """The slabs that one cache group has.

    Attributes:
        group_idx: index of the group.
        pool: pool of the group.
        used: slab -> number of its blocks with holders; empty if a slab is one block.
        idle_slabs: slabs without used blocks, by the highest retention priority of their idle blocks, in the order in
            which they became idle; the idle blocks instead if a slab is one block.
    """

    @property
    def group_idx(self) -> int: ...
    @property
    def pool(self) -> BlockPool: ...
    @property
    def used(self) -> dict[int, int]: ...
    @property
    def idle_slabs(self) -> tuple[IdleQueue, ...]: ...

    @property
    def num_slabs(self) -> int:
        """Number of slabs that the group has."""

    def slabs(self) -> list[int]:
        """Return the slabs that the group has, in no order."""

    def is_scattered(self) -> bool:
        """Return whether the used blocks would fill fewer slabs; called if no block is idle."""

    def return_idle_slabs(self, count: int) -> None:
        """Evict the blocks of the idle slabs that are first in order, and return the slabs to the arena."""

    def evict_oldest(self, count: int) -> None:
        """Evict the pool's next victims; they become free blocks of this group."""

    def compact_slab(self) -> None:
        """Move the used blocks of the least used slab to other slabs, and return the slab to the arena."""


def ages_of_idle(queues: Sequence[IdleQueue], most: int) -> list[Age]:
    """Return the ages of the first entries of queues, one for each retention priority, in the order of eviction."""
    ages: list[Age] = []
    for priority, queue in enumerate(queues):
        if queue and len(ages) < most:
            ages += ages_of(priority, queue.oldest_moments(most - len(ages)))
    return ages


def oldest_idle(queues: Sequence[IdleQueue], count: int) -> list[int]:
    """Return the first entries of queues, one for each retention priority, in the order of eviction."""
    oldest: list[int] = []
    for queue in queues:
        if queue and len(oldest) < count:
            oldest += queue.oldest(count - len(oldest))
    return oldest
