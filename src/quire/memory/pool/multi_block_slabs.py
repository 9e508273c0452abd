"""Slabs with several blocks of a group each, with counts of the used and idle blocks of each slab."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.memory.pool.idle_blocks import Part, RetentionPriority
from quire.memory.pool.idle_queue import IdleQueue
from quire.memory.pool.pool import BlockPool
from quire.memory.pool.slab_supply import Reclaim, SlabSupply, oldest_idle
from quire.memory.results import BlockCopy


class MultiBlockSlabs:
    """`GroupSlabs` with the numbers of used and idle blocks of each slab."""

    __slots__ = ("_idle", "_reclaim", "_supply", "group_idx", "idle_slabs", "pool", "used")

    def __init__(self, supply: SlabSupply, group_idx: int, pool: BlockPool, reclaim: Reclaim) -> None:
        self._supply = supply
        self._reclaim = reclaim
        self.group_idx = group_idx
        self.pool = pool
        self.used: dict[int, int] = {}
        # Slab -> number of idle blocks of each retention priority.
        self._idle: dict[int, list[int]] = {}
        self.idle_slabs: tuple[IdleQueue, ...] = tuple(IdleQueue(supply.clock) for _ in RetentionPriority)

    @property
    def num_slabs(self) -> int:
        """Number of slabs that the group has."""
        return len(self.used)

    def slabs(self) -> list[int]:
        """Return the slabs that the group has, in no order."""
        return list(self.used)

    def is_scattered(self) -> bool:
        """Return whether the used blocks would fill fewer slabs; called if no block is idle."""
        return len(self.used) > self._supply.num_slabs_for(self.group_idx, self.pool.num_used)

    # ---- called by the pool ----

    def reserve(self, count: int) -> None:
        """Make `count` blocks free."""
        supply, free = self._supply, self.pool.free
        while len(free) < count:
            if supply.free:
                self._acquire(supply.num_slabs_for(self.group_idx, count - len(free)))
            else:
                self._reclaim(self.group_idx, count - len(free))

    def on_allocate(self, block_ids: Sequence[int]) -> None:
        """Count free blocks as used."""
        for slab in self._slabs_of(block_ids):
            self.used[slab] += 1
            self._settle(slab)

    def on_reuse(self, parts: Sequence[Part]) -> None:
        """Count idle blocks as used."""
        for priority, block_ids, _ in parts:
            for slab in self._slabs_of(block_ids):
                self._idle[slab][priority] -= 1
                self.used[slab] += 1
                self._settle(slab)

    def on_idle(self, parts: Sequence[Part]) -> None:
        """Count used blocks as idle."""
        for priority, block_ids, moments in parts:
            for slab, moment in zip(self._slabs_of(block_ids), moments, strict=True):
                self._idle[slab][priority] += 1
                self.used[slab] -= 1
                self._settle(slab, moment)

    def on_reprioritise(self, old: Sequence[Part], new: Sequence[Part]) -> None:
        """Count idle blocks under another retention priority, or as if they had just become idle."""
        for change, parts in ((-1, old), (1, new)):
            for priority, block_ids, _ in parts:
                for slab in self._slabs_of(block_ids):
                    self._idle[slab][priority] += change
        for _, block_ids, moments in new:
            for slab, moment in zip(self._slabs_of(block_ids), moments, strict=True):
                self._leave_idle(slab)
                self._settle(slab, moment)

    def on_free(self, block_ids: Sequence[int]) -> None:
        """Count used blocks as free; return slabs whose blocks are all free."""
        slabs = self._slabs_of(block_ids)
        emptied = []
        for slab in slabs:
            self.used[slab] -= 1
            if self._settle(slab):
                emptied.append(slab)
        if emptied:
            self.return_slabs(emptied)

    def on_empty(self, parts: Sequence[Part]) -> None:
        """Count idle blocks as free; return slabs whose blocks are all free."""
        slabs = self._slabs_of([block_id for part in parts for block_id in part.block_ids])
        self._uncount_idle(parts)
        slabs = [slab for slab in dict.fromkeys(slabs) if not self.used[slab] and not any(self._idle[slab])]
        if slabs:
            self.return_slabs(slabs)

    # ---- called by the arena ----

    def return_idle_slabs(self, count: int) -> None:
        """Evict the blocks of the idle slabs that are first in order, and return the slabs."""
        slabs = oldest_idle(self.idle_slabs, count)
        blocks = self._supply.layout.blocks_in(self.group_idx, slabs)
        self.evict([block_id for block_id in blocks if block_id in self.pool.idle])
        self.return_slabs(slabs)

    def evict_oldest(self, count: int) -> None:
        """Evict the pool's next victims."""
        self.evict(self.pool.idle.victims(count))

    def compact_slab(self) -> None:
        """Move the used blocks of the least used slab to other slabs, and return the slab."""
        slab = min(self.used, key=lambda slab: (self.used[slab], slab))
        blocks = self._blocks_of(slab)
        self.evict([block_id for block_id in blocks if block_id in self.pool.idle])
        for block_id in blocks:
            if self.pool.ref_counts[block_id]:
                self._move(block_id, slab)
        self.return_slabs([slab])

    # ---- steps ----

    def _slabs_of(self, block_ids: Iterable[int]) -> list[int]:
        return self._supply.layout.slabs_of(self.group_idx, block_ids)

    def _blocks_of(self, slab: int) -> range:
        return self._supply.layout.blocks_of(self.group_idx, slab)

    def _acquire(self, most: int) -> None:
        """Take at most `most` free slabs."""
        stack = self._supply.free
        slabs = stack[-most:]
        del stack[-most:]
        for slab in slabs:
            self.used[slab], self._idle[slab] = 0, [0] * len(RetentionPriority)
        # At the bottom of the stack: blocks of slabs that are in use already are taken first.
        slabs.reverse()
        self.pool.free[:0] = reversed(self._supply.layout.blocks_in(self.group_idx, slabs))

    def evict(self, block_ids: Sequence[int]) -> None:
        """Evict idle blocks; they become free blocks of this group."""
        parts = self.pool.evict(block_ids)
        self.pool.free += block_ids
        self._uncount_idle(parts)

    def _uncount_idle(self, parts: Sequence[Part]) -> None:
        """Remove blocks from the counts of idle ones."""
        for priority, block_ids, _ in parts:
            for slab in self._slabs_of(block_ids):
                self._idle[slab][priority] -= 1
                self._settle(slab)

    def _settle(self, slab: int, moment: int | None = None) -> bool:
        """Move a slab to the queue of idle slabs that its counts require, or to none; return whether it is empty."""
        priority = None
        is_empty = not self.used[slab]
        if is_empty:
            counts = self._idle[slab]
            priority = next((priority for priority in reversed(RetentionPriority) if counts[priority]), None)
            is_empty = priority is None
        if priority is None or slab not in self.idle_slabs[priority]:
            self._leave_idle(slab)
            if priority is not None:
                self.idle_slabs[priority].add((slab,), None if moment is None else (moment,))
        return is_empty

    def _leave_idle(self, slab: int) -> None:
        for queue in self.idle_slabs:
            if slab in queue:
                queue.discard((slab,))

    def _move(self, block_id: int, slab: int) -> None:
        """Move a used block of a slab to a free block of another slab, evicting an idle block if there is none."""
        inside = self._blocks_of(slab)
        elsewhere = next((target for target in reversed(self.pool.free) if target not in inside), None)
        if elsewhere is None:
            self.evict(self.pool.idle.victims(1))
            elsewhere = self.pool.free[-1]
        self.pool.move(block_id, elsewhere)
        self.used[slab] -= 1
        (target_slab,) = self._slabs_of((elsewhere,))
        self.used[target_slab] += 1
        self._settle(target_slab)
        tier = self._supply.tier
        self._supply.moves.append(BlockCopy(self.group_idx, block_id, elsewhere, tier, tier))

    def return_slabs(self, slabs: list[int]) -> None:
        """Return slabs whose blocks are all free to the arena."""
        free, gone = self.pool.free, set(slabs)
        free[:] = [block_id for block_id, slab in zip(free, self._slabs_of(free), strict=True) if slab not in gone]
        for slab in slabs:
            del self.used[slab], self._idle[slab]
            self._leave_idle(slab)
        self._supply.free += slabs
