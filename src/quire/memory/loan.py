"""What one cache group has of the arena: its slabs, and what is used and idle in each.

A group whose blocks fill a slab each needs no counts: whatever becomes of a block becomes of its slab.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import takewhile
from sys import maxsize
from typing import TYPE_CHECKING

from quire.memory.ops import BlockCopy
from quire.memory.pool import BlockPool
from quire.memory.rest_queue import RestQueue

if TYPE_CHECKING:
    from quire.memory.arena import Arena

# Whether something carries the hint, and since when it has been idle: the least goes first.
Age = tuple[bool, int]
NEVER: Age = (True, maxsize)


class Loan:
    """The slabs that one group has.

    Args:
        arena: lends them.
        group_idx: the group.
        pool: its blocks.

    Attributes:
        is_whole: True where each block fills a slab.
        used: of each slab that the group has, the blocks with holders; empty where a slab has one block.
        resting: slabs without used blocks but with idle ones, the one that came to rest first in front; and when
            that was. Where each block fills a slab, those blocks.
    """

    __slots__ = ("_arena", "_idle", "_idle_since", "group_idx", "is_whole", "pool", "resting", "used")

    def __init__(self, arena: Arena, group_idx: int, pool: BlockPool) -> None:
        self._arena = arena
        self.group_idx = group_idx
        self.pool = pool
        self.used: dict[int, int] = {}
        self.is_whole = arena.layout.blocks_per_slab[group_idx] == 1
        # Both empty, as `used` is, where `resting` says it all.
        self._idle: dict[int, int] = {}
        self._idle_since: dict[int, int] = {}
        self.resting = pool.rest if self.is_whole else RestQueue(arena.clock)
        if len(arena.pools) > 1:
            pool.lender = self

    @property
    def num_slabs(self) -> int:
        """Slabs that the group has."""
        return self.pool.num_used + len(self.resting) + len(self.pool.free) if self.is_whole else len(self.used)

    def slabs(self) -> list[int]:
        """Return the slabs that the group has, in no order."""
        if not self.is_whole:
            return list(self.used)
        used = [block_id for block_id, count in enumerate(self.pool.ref_counts) if count]
        return self._slabs_of([*used, *self.resting, *self.pool.free])

    def is_scattered(self) -> bool:
        """Say whether the used blocks would fill fewer slabs than those with used blocks in them.

        It is asked where nothing is idle.
        """
        return not self.is_whole and len(self.used) > self._arena.num_slabs_for(self.group_idx, self.pool.num_used)

    # ---- what the pool tells ----

    def lend(self, count: int) -> None:
        """See that `count` blocks are free."""
        arena, free = self._arena, self.pool.free
        while len(free) < count:
            if arena.free_slabs:
                self._borrow(arena.num_slabs_for(self.group_idx, count - len(free)))
            else:
                arena.make_room(self, count - len(free))

    def took(self, block_ids: Sequence[int]) -> None:
        """Note that free blocks have holders now."""
        if self.is_whole:
            return
        used, resting = self.used, self.resting
        for slab in self._slabs_of(block_ids):
            if slab in resting:
                resting.discard((slab,))
            used[slab] += 1

    def woke(self, block_ids: Sequence[int]) -> None:
        """Note that idle blocks have holders now."""
        self._wake(block_ids)
        self.took(block_ids)

    def rested(self, block_ids: Sequence[int]) -> None:
        """Note that blocks have no holders any more, but are published."""
        if self.is_whole:
            if not self.pool.idle.keeps_rest:
                self.resting.add(block_ids)
            return
        used, idle, resting = self.used, self._idle, self.resting
        self._idle_since.update(zip(block_ids, self._arena.clock.ticks(len(block_ids)), strict=True))
        for slab in self._slabs_of(block_ids):
            idle[slab] += 1
            used[slab] = left = used[slab] - 1
            if not left:
                resting.add((slab,))

    def rested_anew(self, block_id: int) -> None:
        """Note that an idle block counts as if it had just become idle; so does its slab, if that is at rest."""
        if self.is_whole:
            if not self.pool.idle.keeps_rest:
                self.resting.discard((block_id,))
                self.resting.add((block_id,))
            return
        (slab,) = self._slabs_of((block_id,))
        (self._idle_since[block_id],) = self._arena.clock.ticks(1)
        if slab in self.resting:
            self.resting.discard((slab,))
            self.resting.add((slab,))

    def freed(self, block_ids: Sequence[int]) -> None:
        """Note that blocks hold nothing any more; slabs of which all blocks are free go back."""
        slabs = self._slabs_of(block_ids)
        if self.is_whole:
            self._give_back(slabs)
            return
        used, emptied = self.used, []
        for slab in slabs:
            used[slab] -= 1
            if not used[slab]:
                if self._idle[slab]:
                    self.resting.add((slab,))
                else:
                    emptied.append(slab)
        if emptied:
            self._give_back(emptied)

    # ---- what the arena asks for ----

    def oldest_idle(self) -> Age:
        """Return the age of the pool's next victim, `NEVER` without one."""
        return self._age(self.pool.next_victim()) if self.resting or self._idle_since else NEVER

    def oldest_resting(self) -> Age:
        """Return the age of the slab at rest that is to go first, of at least one."""
        ((age, _),) = self._next_resting(1)
        return age

    def return_resting_slabs(self, most: int, before: Age) -> None:
        """Evict what is idle in the slabs at rest that are to go first, and give them back.

        Args:
            most: slabs.
            before: only slabs that go before what is of that age.
        """
        resting = self._resting_before(most, before)
        if self.is_whole:
            self._evict(resting)
            self._give_back(self._slabs_of(resting))
            return
        blocks = self._arena.layout.blocks_in(self.group_idx, resting)
        self._evict([block_id for block_id in blocks if block_id in self._idle_since])
        self._give_back(resting)

    def evict_oldest(self, most: int, before: Age) -> None:
        """Evict the next victims.

        Args:
            most: blocks.
            before: none from the first on that does not go before what is of that age.
        """
        victims = self.pool.next_victims(most)
        if self._arena.retention.of_group[self.group_idx]:
            victims = list(takewhile(lambda block_id: self._age(block_id) < before, victims))
        elif not before[0]:
            moments = takewhile(before[1].__gt__, self._since(victims))
            victims = [block_id for block_id, _ in zip(victims, moments, strict=False)]
        self._evict(victims)

    def vacate_a_slab(self) -> None:
        """Move the used blocks of the slab that has fewest to the group's other slabs, and give it back."""
        slab = min(self.used, key=lambda slab: (self.used[slab], slab))
        blocks = self._blocks_of(slab)
        self._evict([block_id for block_id in blocks if block_id in self._idle_since])
        for block_id in blocks:
            if self.pool.ref_counts[block_id]:
                self._move(block_id, slab)
        self._give_back([slab])

    # ---- steps ----

    def _age(self, block_id: int) -> Age:
        return block_id in self._arena.retention.of_group[self.group_idx], self._since((block_id,))[0]

    def _since(self, block_ids: Sequence[int]) -> list[int]:
        """Return when idle blocks became so."""
        if self.is_whole:
            return self.resting.since(list(block_ids))
        return [self._idle_since[block_id] for block_id in block_ids]

    def _resting_before(self, most: int, before: Age) -> list[int]:
        """Return what of `resting` is to go first, at most so many, as long as it goes before that age."""
        if self._arena.retention.of_group[self.group_idx]:
            return [number for age, number in self._next_resting(most) if age < before]
        numbers = self.resting.oldest(most)
        return numbers if before[0] else numbers[: bisect_left(self.resting.since(numbers), before[1])]

    def _next_resting(self, most: int) -> list[tuple[Age, int]]:
        """Return what of `resting` is to go first, each with its age; what has the hint comes last."""
        if not self._arena.retention.of_group[self.group_idx]:
            numbers = self.resting.oldest(most)
            return [
                ((False, since), number) for number, since in zip(numbers, self.resting.since(numbers), strict=True)
            ]
        hints = self._arena.retention
        plain, hinted = [], []
        for number, since in self.resting.items():
            is_hinted = (
                number in hints.of_group[self.group_idx] if self.is_whole else hints.is_in_slab(self.group_idx, number)
            )
            if is_hinted:
                hinted.append(((True, since), number))
            else:
                plain.append(((False, since), number))
                if len(plain) == most:
                    break
        return (plain + hinted)[:most]

    def _slabs_of(self, block_ids: Iterable[int]) -> list[int]:
        return self._arena.layout.slabs_of(self.group_idx, block_ids)

    def _blocks_of(self, slab: int) -> range:
        return self._arena.layout.blocks_of(self.group_idx, slab)

    def _borrow(self, most: int) -> None:
        """Take slabs that nobody has."""
        stack = self._arena.free_slabs
        slabs = stack[-most:]
        del stack[-most:]
        if self.is_whole:
            self.pool.free[:0] = self._arena.layout.blocks_in(self.group_idx, slabs)
            return
        for counts in (self.used, self._idle):
            counts.update(dict.fromkeys(slabs, 0))
        # Below all else: what is left over is then part of one slab, of which another part is taken.
        slabs.reverse()
        self.pool.free[:0] = reversed(self._arena.layout.blocks_in(self.group_idx, slabs))

    def _evict(self, block_ids: Sequence[int]) -> None:
        self.pool.evict(block_ids)
        self.pool.free += block_ids
        self._wake(block_ids)

    def _wake(self, block_ids: Sequence[int]) -> None:
        """Note that blocks are not idle any more; a slab without idle blocks is not at rest."""
        resting = self.resting
        if self.is_whole:
            if not self.pool.idle.keeps_rest:
                resting.discard(block_ids)
            return
        idle, since = self._idle, self._idle_since
        for block_id, slab in zip(block_ids, self._slabs_of(block_ids), strict=True):
            del since[block_id]
            idle[slab] -= 1
            if not idle[slab] and slab in resting:
                resting.discard((slab,))

    def _move(self, block_id: int, slab: int) -> None:
        """Move one used block out of a slab, to a free block elsewhere, or one that must first be evicted."""
        inside = self._blocks_of(slab)
        elsewhere = next((target for target in reversed(self.pool.free) if target not in inside), None)
        if elsewhere is None:
            self._evict(self.pool.next_victims(1))
            elsewhere = self.pool.free[-1]
        self.pool.move(block_id, elsewhere)
        self.used[slab] -= 1
        (target_slab,) = self._slabs_of((elsewhere,))
        self.used[target_slab] += 1
        if target_slab in self.resting:
            self.resting.discard((target_slab,))
        tier = self._arena.tier
        self._arena.moves.append(BlockCopy(self.group_idx, block_id, elsewhere, tier, tier))

    def _give_back(self, slabs: list[int]) -> None:
        """Return slabs of which all blocks are free."""
        free = self.pool.free
        if self.is_whole and len(free) == len(slabs):
            free.clear()
        else:
            gone = set(slabs)
            free[:] = [block_id for block_id, slab in zip(free, self._slabs_of(free), strict=True) if slab not in gone]
        if not self.is_whole:
            for slab in slabs:
                del self.used[slab], self._idle[slab]
                if slab in self.resting:
                    self.resting.discard((slab,))
        self._arena.free_slabs += slabs
