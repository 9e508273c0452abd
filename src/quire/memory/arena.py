"""The arena: one range of bytes that all cache groups share, lent to them in slabs.

A group that needs blocks gets, in this order: a slab that nobody has; the blocks that have been idle for longest,
its own or, by the slab, another group's; and when what is free lies scattered over slabs of another group, that group
moves its blocks together and gives a slab up. So what counts is only how many slabs the blocks with holders fill when
they lie close, and that is what `can_hold` adds up: its answer is exact.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest

from quire.memory.eviction import EvictionPolicy
from quire.memory.ops import BlockCopy, Tier
from quire.memory.pool import NULL_BLOCK, BlockPool
from quire.memory.retention import HintedLast, Retention
from quire.memory.slabs import SlabLayout, lay_out


class Arena:
    """The slabs, and the groups that they are lent to.

    With one group a slab is a block, and the group has them all from the start.

    Args:
        layout: of the bytes.
        pools: of the groups; when there are several, they have no blocks of their own.
        retention: which blocks are to be evicted last; None is none.
        tier: where the bytes are.

    Attributes:
        moves: blocks that were moved and that tables still name by their old ids, and copies that were made of blocks
            before they went; the manager empties it. Arenas of several tiers share one list: the order counts.
    """

    __slots__ = ("_clock", "free_slabs", "layout", "loans", "moves", "pools", "retention", "tier")

    def __init__(
        self,
        layout: SlabLayout,
        pools: Sequence[BlockPool],
        retention: Retention | None = None,
        tier: Tier = Tier.DEVICE,
    ) -> None:
        self.layout = layout
        self.tier = tier
        self.retention = retention or Retention(layout, 0)
        self.pools = tuple(pools)
        # A stack with the lowest slab on top.
        self.free_slabs = list(range(layout.num_slabs - 1, -1, -1)) if len(pools) > 1 else []
        self.moves: list[BlockCopy] = []
        self._clock = 0
        self.loans = tuple(Loan(self, idx, pool) for idx, pool in enumerate(self.pools))

    def num_slabs_for(self, group_idx: int, num_blocks: int) -> int:
        """Return the slabs that so many blocks of a group fill."""
        return -(-num_blocks // self.layout.blocks_per_slab[group_idx])

    def can_hold(self, needs: Sequence[int]) -> bool:
        """Say whether every group can have so many blocks with holders more than it has now."""
        filled = sum(self.num_slabs_for(idx, pool.num_used + needs[idx]) for idx, pool in enumerate(self.pools))
        return filled <= self.layout.num_slabs

    def room(self, group_idx: int, needs: Sequence[int]) -> int:
        """Return the blocks that a group could have beyond its used ones if all others got what they need.

        `can_hold(needs)` exactly when the group's need is no more than that; negative when even nothing is too much.
        """
        others = sum(
            self.num_slabs_for(idx, pool.num_used + needs[idx])
            for idx, pool in enumerate(self.pools)
            if idx != group_idx
        )
        blocks = self.layout.blocks_per_slab[group_idx] * (self.layout.num_slabs - others)
        return blocks - self.pools[group_idx].num_used

    def tick(self) -> int:
        """Return the next moment; blocks that became idle at an earlier one are older."""
        self._clock += 1
        return self._clock

    def free_a_slab(self, wanted_by: Loan) -> bool:
        """Have a slab returned for a group, or leave it to the group to evict a block of its own.

        What carries the hint goes after what does not.

        Returns:
            False when the group's own next victim has been idle for longer than any other group's whole slab.
        """
        own = wanted_by.oldest_idle()
        others = [(*loan.oldest_resting(), loan) for loan in self.loans if loan is not wanted_by and loan.resting]
        if others:
            is_hinted, since, slab, loan = min(others, key=lambda resting: resting[:2])
            if own is None or (is_hinted, since) < own:
                loan.return_resting_slab(slab)
                return True
        if own is not None:
            return False
        for loan in self.loans:
            if loan is not wanted_by and len(loan.used) > self.num_slabs_for(loan.group_idx, loan.pool.num_used):
                loan.vacate_a_slab()
                return True
        raise AssertionError("more blocks are taken than can_hold allows")

    def evict_last(self, tables: Sequence[Sequence[int]]) -> None:
        """Give the hint to the published blocks of a sequence.

        Tails get it first, in all groups, so that they lose it before the heads.

        Args:
            tables: its block ids in each group; they have holders.
        """
        if not self.retention.limit:
            return
        for blocks in reversed(list(zip_longest(*tables, fillvalue=NULL_BLOCK))):
            for idx, block_id in enumerate(blocks):
                if block_id in self.pools[idx].index:
                    for other, dropped in self.retention.add(idx, block_id):
                        self.pools[other].rest_anew(dropped)


def build_arena(
    block_bytes: Sequence[int],
    num_blocks: int | None,
    num_bytes: int | None,
    policy: Callable[[], EvictionPolicy],
    *,
    retention_limit: int = 0,
    tier: Tier = Tier.DEVICE,
) -> Arena:
    """Return an arena with nothing in it.

    Args:
        block_bytes: of each group.
        num_blocks: for each group, when all blocks are of the same bytes; or
        num_bytes: the whole range.
        policy: makes the eviction policy of a group.
        retention_limit: slabs that blocks which are to be evicted last may fill.
        tier: where the bytes are.

    Raises:
        ValueError: the groups' blocks differ and no bytes are given; and what `lay_out` raises.
    """
    if num_blocks is not None and len(set(block_bytes)) > 1:
        raise ValueError(f"blocks of {sorted(set(block_bytes))} bytes share an arena: give num_bytes")
    num_slabs = None if num_blocks is None else num_blocks * len(block_bytes)
    layout = lay_out(block_bytes, num_bytes=num_bytes, num_slabs=num_slabs)
    own = range(layout.num_slabs, 0, -1) if len(block_bytes) == 1 else range(0)
    retention = Retention(layout, retention_limit)
    pools = []
    for idx in range(len(block_bytes)):
        idle = partial(HintedLast, policy, retention, idx) if retention_limit else policy
        pools.append(BlockPool(layout.num_ids(idx), idle, own))
    return Arena(layout, pools, retention, tier)


class Loan:
    """The slabs that one group has.

    Args:
        arena: lends them.
        group_idx: the group.
        pool: its blocks.

    Attributes:
        used: of each slab that the group has, the blocks with holders.
        resting: slabs without used blocks but with idle ones, the one that came to rest first in front; and when
            that was.
    """

    __slots__ = ("_arena", "_idle", "_idle_since", "group_idx", "pool", "resting", "used")

    def __init__(self, arena: Arena, group_idx: int, pool: BlockPool) -> None:
        self._arena = arena
        self.group_idx = group_idx
        self.pool = pool
        self.used: dict[int, int] = {}
        self._idle: dict[int, int] = {}
        self._idle_since: dict[int, int] = {}
        self.resting: OrderedDict[int, int] = OrderedDict()
        if len(arena.pools) > 1:
            pool.lender = self

    # ---- what the pool tells ----

    def lend(self, count: int) -> None:
        """See that `count` blocks are free."""
        arena, free = self._arena, self.pool.free
        while len(free) < count:
            if arena.free_slabs or arena.free_a_slab(self):
                slab = arena.free_slabs.pop()
                self.used[slab] = self._idle[slab] = 0
                # Below all else: what is left over is then part of one slab, of which another part is taken.
                free[:0] = reversed(arena.layout.blocks_of(self.group_idx, slab))
            else:
                self._evict_next()

    def took(self, block_ids: Sequence[int]) -> None:
        """Note that free blocks have holders now."""
        for block_id in block_ids:
            slab = self._slab_of(block_id)
            self.used[slab] += 1
            self.resting.pop(slab, None)

    def woke(self, block_ids: Sequence[int]) -> None:
        """Note that idle blocks have holders now."""
        for block_id in block_ids:
            slab = self._slab_of(block_id)
            del self._idle_since[block_id]
            self._idle[slab] -= 1
            self.used[slab] += 1
            self.resting.pop(slab, None)

    def rested(self, block_ids: Sequence[int]) -> None:
        """Note that blocks have no holders any more, but are published."""
        for block_id in block_ids:
            slab = self._slab_of(block_id)
            now = self._idle_since[block_id] = self._arena.tick()
            self._idle[slab] += 1
            self.used[slab] -= 1
            if not self.used[slab]:
                self.resting[slab] = now

    def rested_anew(self, block_id: int) -> None:
        """Note that an idle block counts as if it had just become idle; so does its slab, if that is at rest."""
        slab = self._slab_of(block_id)
        now = self._idle_since[block_id] = self._arena.tick()
        if self.resting.pop(slab, None) is not None:
            self.resting[slab] = now

    def freed(self, block_ids: Sequence[int]) -> None:
        """Note that blocks hold nothing any more; slabs of which all blocks are free go back."""
        emptied = []
        for block_id in block_ids:
            slab = self._slab_of(block_id)
            self.used[slab] -= 1
            if not self.used[slab]:
                if self._idle[slab]:
                    self.resting[slab] = self._arena.tick()
                else:
                    emptied.append(slab)
        if emptied:
            self._give_back(emptied)

    # ---- what the arena asks for ----

    def oldest_idle(self) -> tuple[bool, int] | None:
        """Return whether the pool's next victim carries the hint and since when it is idle, None without one."""
        if not self._idle_since:
            return None
        victim = self.pool.next_victim()
        return victim in self._arena.retention.of_group[self.group_idx], self._idle_since[victim]

    def oldest_resting(self) -> tuple[bool, int, int]:
        """Return whether the slab at rest that is to go first has blocks with the hint, since when it rests, and it."""
        is_hinted = self._arena.retention.is_in_slab
        for slab, since in self.resting.items():
            if not is_hinted(self.group_idx, slab):
                return False, since, slab
        slab, since = next(iter(self.resting.items()))
        return True, since, slab

    def return_resting_slab(self, slab: int) -> None:
        """Evict what is idle in a slab at rest, and give it back."""
        for block_id in self._blocks_of(slab):
            if block_id in self._idle_since:
                self._evict(block_id)
        self._give_back([slab])

    def vacate_a_slab(self) -> None:
        """Move the used blocks of the slab that has fewest to the group's other slabs, and give it back."""
        slab = min(self.used, key=lambda slab: (self.used[slab], slab))
        blocks = self._blocks_of(slab)
        for block_id in blocks:
            if block_id in self._idle_since:
                self._evict(block_id)
        for block_id in blocks:
            if self.pool.ref_counts[block_id]:
                self._move(block_id, slab)
        self._give_back([slab])

    # ---- steps ----

    def _slab_of(self, block_id: int) -> int:
        return self._arena.layout.slab_of(self.group_idx, block_id)

    def _blocks_of(self, slab: int) -> range:
        return self._arena.layout.blocks_of(self.group_idx, slab)

    def _evict_next(self) -> None:
        self._evict(self.pool.next_victim())

    def _evict(self, block_id: int) -> None:
        self.pool.evict((block_id,))
        self.pool.free.append(block_id)
        del self._idle_since[block_id]
        slab = self._slab_of(block_id)
        self._idle[slab] -= 1
        if not self._idle[slab]:
            self.resting.pop(slab, None)

    def _move(self, block_id: int, slab: int) -> None:
        """Move one used block out of a slab, to a free block elsewhere, or one that must first be evicted."""
        elsewhere = next((target for target in reversed(self.pool.free) if self._slab_of(target) != slab), None)
        if elsewhere is None:
            self._evict_next()
            elsewhere = self.pool.free[-1]
        self.pool.move(block_id, elsewhere)
        self.used[slab] -= 1
        target_slab = self._slab_of(elsewhere)
        self.used[target_slab] += 1
        self.resting.pop(target_slab, None)
        tier = self._arena.tier
        self._arena.moves.append(BlockCopy(self.group_idx, block_id, elsewhere, tier, tier))

    def _give_back(self, slabs: list[int]) -> None:
        """Return slabs of which all blocks are free."""
        gone = set(slabs)
        self.pool.free = [block_id for block_id in self.pool.free if self._slab_of(block_id) not in gone]
        for slab in slabs:
            del self.used[slab], self._idle[slab]
            self.resting.pop(slab, None)
            self._arena.free_slabs.append(slab)
