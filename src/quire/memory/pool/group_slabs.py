"""What one cache group has of the arena: its slabs, and what is used and idle in each.

A group whose blocks fill a slab each needs no counts: whatever becomes of a block becomes of its slab.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from quire.memory.pool.idle_blocks import Age, Part, RetentionPriority, ages_of
from quire.memory.pool.idle_queue import IdleQueue
from quire.memory.pool.pool import BlockPool
from quire.memory.results import BlockCopy

if TYPE_CHECKING:
    from quire.memory.pool.arena import Arena


class GroupSlabs:
    """The slabs that one group has.

    Args:
        arena: lends them.
        group_idx: the group.
        pool: its blocks.

    Attributes:
        is_whole: True where each block fills a slab.
        used: of each slab that the group has, the blocks with holders; empty where a slab has one block.
        resting: slabs without used blocks but with idle ones, by the highest retention priority of those, in the order
            in which they came to rest. Where each block fills a slab, those blocks.
    """

    __slots__ = ("_arena", "_idle", "group_idx", "idle_slabs", "one_block_per_slab", "pool", "used")

    def __init__(self, arena: Arena, group_idx: int, pool: BlockPool) -> None:
        self._arena = arena
        self.group_idx = group_idx
        self.pool = pool
        self.used: dict[int, int] = {}
        self.one_block_per_slab = arena.layout.blocks_per_slab[group_idx] == 1
        # By slab, the idle blocks of each retention priority; empty, as `used` is, where `idle_slabs` says it all.
        self._idle: dict[int, list[int]] = {}
        own = (IdleQueue(arena.clock) for _ in RetentionPriority)
        self.idle_slabs: tuple[IdleQueue, ...] = pool.idle.queues if self.one_block_per_slab else tuple(own)
        if len(arena.pools) > 1:
            pool.source = self

    @property
    def num_slabs(self) -> int:
        """Slabs that the group has."""
        return (
            self.pool.num_used + len(self.pool.idle) + len(self.pool.free)
            if self.one_block_per_slab
            else len(self.used)
        )

    def slabs(self) -> list[int]:
        """Return the slabs that the group has, in no order."""
        if not self.one_block_per_slab:
            return list(self.used)
        used = [block_id for block_id, count in enumerate(self.pool.ref_counts) if count]
        return self._slabs_of([*used, *self.pool.idle, *self.pool.free])

    def is_scattered(self) -> bool:
        """Say whether the used blocks would fill fewer slabs than those with used blocks in them.

        It is asked where nothing is idle.
        """
        return not self.one_block_per_slab and len(self.used) > self._arena.num_slabs_for(
            self.group_idx, self.pool.num_used
        )

    # ---- what the pool tells ----

    def reserve(self, count: int) -> None:
        """See that `count` blocks are free."""
        arena, free = self._arena, self.pool.free
        while len(free) < count:
            if arena.free_slabs:
                self._acquire(arena.num_slabs_for(self.group_idx, count - len(free)))
            else:
                arena.reclaim(self, count - len(free))

    def on_allocate(self, block_ids: Sequence[int]) -> None:
        """Note that free blocks have holders now."""
        if not self.one_block_per_slab:
            for slab in self._slabs_of(block_ids):
                self.used[slab] += 1
                self._settle(slab)

    def on_reuse(self, parts: Sequence[Part]) -> None:
        """Note that idle blocks have holders now."""
        if not self.one_block_per_slab:
            for priority, block_ids, _ in parts:
                for slab in self._slabs_of(block_ids):
                    self._idle[slab][priority] -= 1
                    self.used[slab] += 1
                    self._settle(slab)

    def on_idle(self, parts: Sequence[Part]) -> None:
        """Note that blocks have no holders any more, but are published."""
        if not self.one_block_per_slab:
            for priority, block_ids, moments in parts:
                for slab, moment in zip(self._slabs_of(block_ids), moments, strict=True):
                    self._idle[slab][priority] += 1
                    self.used[slab] -= 1
                    self._settle(slab, moment)

    def reprioritised(self, old: Sequence[Part], new: Sequence[Part]) -> None:
        """Note that idle blocks have another retention priority, or are as if they had just become idle."""
        if not self.one_block_per_slab:
            for change, parts in ((-1, old), (1, new)):
                for priority, block_ids, _ in parts:
                    for slab in self._slabs_of(block_ids):
                        self._idle[slab][priority] += change
            for _, block_ids, moments in new:
                for slab, moment in zip(self._slabs_of(block_ids), moments, strict=True):
                    self._leave_rest(slab)
                    self._settle(slab, moment)

    def on_free(self, block_ids: Sequence[int]) -> None:
        """Note that blocks have no holders any more and hold nothing; slabs of which all blocks are free go back."""
        slabs = self._slabs_of(block_ids)
        if self.one_block_per_slab:
            self._give_back(slabs)
            return
        emptied = []
        for slab in slabs:
            self.used[slab] -= 1
            if self._settle(slab):
                emptied.append(slab)
        if emptied:
            self._give_back(emptied)

    def emptied(self, parts: Sequence[Part]) -> None:
        """Note that idle blocks are free; slabs of which all blocks are free go back."""
        slabs = self._slabs_of([block_id for part in parts for block_id in part.block_ids])
        if not self.one_block_per_slab:
            self._dropped(parts)
            slabs = [slab for slab in dict.fromkeys(slabs) if not self.used[slab] and not any(self._idle[slab])]
        if slabs:
            self._give_back(slabs)

    # ---- what the arena asks for ----

    def ages_of_resting(self, most: int) -> list[Age]:
        """Return the ages of the slabs at rest that are to go first, in that order."""
        ages: list[Age] = []
        for priority, queue in enumerate(self.idle_slabs):
            if queue and len(ages) < most:
                ages += ages_of(priority, queue.oldest_moments(most - len(ages)))
        return ages

    def return_resting_slabs(self, count: int) -> None:
        """Evict what is idle in the slabs at rest that are to go first, and give them back."""
        idle_slabs: list[int] = []
        for queue in self.idle_slabs:
            if queue and len(idle_slabs) < count:
                idle_slabs += queue.oldest(count - len(idle_slabs))
        if self.one_block_per_slab:
            self._evict(idle_slabs)
            self._give_back(self._slabs_of(idle_slabs))
            return
        blocks = self._arena.layout.blocks_in(self.group_idx, idle_slabs)
        self._evict([block_id for block_id in blocks if block_id in self.pool.idle])
        self._give_back(idle_slabs)

    def evict_oldest(self, count: int) -> None:
        """Evict the pool's next victims."""
        self._evict(self.pool.idle.victims(count))

    def compact_slab(self) -> None:
        """Move the used blocks of the slab that has fewest to the group's other slabs, and give it back."""
        slab = min(self.used, key=lambda slab: (self.used[slab], slab))
        blocks = self._blocks_of(slab)
        self._evict([block_id for block_id in blocks if block_id in self.pool.idle])
        for block_id in blocks:
            if self.pool.ref_counts[block_id]:
                self._move(block_id, slab)
        self._give_back([slab])

    # ---- steps ----

    def _slabs_of(self, block_ids: Iterable[int]) -> list[int]:
        return self._arena.layout.slabs_of(self.group_idx, block_ids)

    def _blocks_of(self, slab: int) -> range:
        return self._arena.layout.blocks_of(self.group_idx, slab)

    def _acquire(self, most: int) -> None:
        """Take slabs that nobody has."""
        stack = self._arena.free_slabs
        slabs = stack[-most:]
        del stack[-most:]
        if self.one_block_per_slab:
            self.pool.free[:0] = self._arena.layout.blocks_in(self.group_idx, slabs)
            return
        for slab in slabs:
            self.used[slab], self._idle[slab] = 0, [0] * len(RetentionPriority)
        # Below all else: what is left over is then part of one slab, of which another part is taken.
        slabs.reverse()
        self.pool.free[:0] = reversed(self._arena.layout.blocks_in(self.group_idx, slabs))

    def _evict(self, block_ids: Sequence[int]) -> None:
        parts = self.pool.evict(block_ids)
        self.pool.free += block_ids
        self._dropped(parts)

    def _dropped(self, parts: Sequence[Part]) -> None:
        """Note that idle blocks are free."""
        if not self.one_block_per_slab:
            for priority, block_ids, _ in parts:
                for slab in self._slabs_of(block_ids):
                    self._idle[slab][priority] -= 1
                    self._settle(slab)

    def _settle(self, slab: int, moment: int | None = None) -> bool:
        """Have a slab at rest, or not, as its counts say.

        Args:
            slab: of which a block has changed.
            moment: at which it comes to rest, if it does; the clock's next one unless given.

        Returns:
            True where none of its blocks is used or idle.
        """
        priority = None
        is_empty = not self.used[slab]
        if is_empty:
            counts = self._idle[slab]
            priority = next((priority for priority in reversed(RetentionPriority) if counts[priority]), None)
            is_empty = priority is None
        if priority is None or slab not in self.idle_slabs[priority]:
            self._leave_rest(slab)
            if priority is not None:
                self.idle_slabs[priority].add((slab,), None if moment is None else (moment,))
        return is_empty

    def _leave_rest(self, slab: int) -> None:
        for queue in self.idle_slabs:
            if slab in queue:
                queue.discard((slab,))

    def _move(self, block_id: int, slab: int) -> None:
        """Move one used block out of a slab, to a free block elsewhere, or one that must first be evicted."""
        inside = self._blocks_of(slab)
        elsewhere = next((target for target in reversed(self.pool.free) if target not in inside), None)
        if elsewhere is None:
            self._evict(self.pool.idle.victims(1))
            elsewhere = self.pool.free[-1]
        self.pool.move(block_id, elsewhere)
        self.used[slab] -= 1
        (target_slab,) = self._slabs_of((elsewhere,))
        self.used[target_slab] += 1
        self._settle(target_slab)
        tier = self._arena.tier
        self._arena.moves.append(BlockCopy(self.group_idx, block_id, elsewhere, tier, tier))

    def _give_back(self, slabs: list[int]) -> None:
        """Return slabs of which all blocks are free."""
        free = self.pool.free
        if self.one_block_per_slab and len(free) == len(slabs):
            free.clear()
        else:
            gone = set(slabs)
            free[:] = [block_id for block_id, slab in zip(free, self._slabs_of(free), strict=True) if slab not in gone]
        if not self.one_block_per_slab:
            for slab in slabs:
                del self.used[slab], self._idle[slab]
                self._leave_rest(slab)
        self._arena.free_slabs += slabs
