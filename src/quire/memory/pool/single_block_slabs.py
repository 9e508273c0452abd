"""Slabs of a group whose blocks each fill a slab: the state of a block is the state of its slab."""

from __future__ import annotations

from collections.abc import Sequence

from quire.memory.pool.idle_blocks import Part
from quire.memory.pool.idle_queue import IdleQueue
from quire.memory.pool.pool import BlockPool
from quire.memory.pool.slab_supply import Reclaim, SlabSupply, oldest_idle


class SingleBlockSlabs:
    """`GroupSlabs` without counts: a slab is one block."""

    __slots__ = ("_reclaim", "_supply", "group_idx", "pool", "used")

    def __init__(self, supply: SlabSupply, group_idx: int, pool: BlockPool, reclaim: Reclaim) -> None:
        self._supply = supply
        self._reclaim = reclaim
        self.group_idx = group_idx
        self.pool = pool
        self.used: dict[int, int] = {}

    @property
    def idle_slabs(self) -> tuple[IdleQueue, ...]:
        """The pool's idle blocks, for each retention priority."""
        return self.pool.idle.queues

    @property
    def num_slabs(self) -> int:
        """Number of slabs that the group has."""
        return self.pool.num_used + len(self.pool.idle) + len(self.pool.free)

    def slabs(self) -> list[int]:
        """Return the slabs that the group has, in no order."""
        used = [block_id for block_id, count in enumerate(self.pool.ref_counts) if count]
        return self._slabs_of([*used, *self.pool.idle, *self.pool.free])

    def is_scattered(self) -> bool:
        """Return False: a slab of one block cannot be fragmented."""
        return False

    # ---- called by the pool ----

    def reserve(self, count: int) -> None:
        """Make `count` blocks free."""
        free, stack = self.pool.free, self._supply.free
        while len(free) < count:
            num_missing = len(free) - count
            if stack:
                free[:0] = self._supply.layout.blocks_in(self.group_idx, stack[num_missing:])
                del stack[num_missing:]
            else:
                self._reclaim(self.group_idx, -num_missing)

    def on_allocate(self, block_ids: Sequence[int]) -> None:
        """Do nothing: the blocks of a slab need no counts."""

    def on_reuse(self, parts: Sequence[Part]) -> None:
        """Do nothing."""

    def on_idle(self, parts: Sequence[Part]) -> None:
        """Do nothing."""

    def on_reprioritise(self, old: Sequence[Part], new: Sequence[Part]) -> None:
        """Do nothing."""

    def on_free(self, block_ids: Sequence[int]) -> None:
        """Return the slabs of blocks that are free now."""
        self.return_slabs(self._slabs_of(block_ids))

    def on_empty(self, parts: Sequence[Part]) -> None:
        """Return the slabs of blocks that were idle and are free now."""
        self.on_free([block_id for part in parts for block_id in part.block_ids])

    # ---- called by the arena ----

    def return_idle_slabs(self, count: int) -> None:
        """Evict the idle blocks that are first in order, and return their slabs."""
        block_ids = oldest_idle(self.idle_slabs, count)
        self.evict(block_ids)
        self.return_slabs(self._slabs_of(block_ids))

    def evict_oldest(self, count: int) -> None:
        """Evict the pool's next victims."""
        self.evict(self.pool.idle.victims(count))

    def compact_slab(self) -> None:
        """Raise: such slabs are never scattered."""
        raise AssertionError("a slab of one block cannot be compacted")

    # ---- steps ----

    def evict(self, block_ids: Sequence[int]) -> None:
        """Evict idle blocks; they become free blocks of this group."""
        self.pool.evict(block_ids)
        self.pool.free += block_ids

    def return_slabs(self, slabs: list[int]) -> None:
        """Return slabs whose block is free to the arena."""
        free = self.pool.free
        if len(free) == len(slabs):
            free.clear()
        else:
            gone = set(slabs)
            free[:] = [block_id for block_id, slab in zip(free, self._slabs_of(free), strict=True) if slab not in gone]
        self._supply.free += slabs

    def _slabs_of(self, block_ids: Sequence[int]) -> list[int]:
        return self._supply.layout.slabs_of(self.group_idx, block_ids)
