"""The arena: one range of bytes that all cache groups share, lent to them in slabs.

A group that needs blocks gets, in this order: a slab that nobody has; the blocks that have been idle for longest,
its own or, by the slab, another group's; and when what is free lies scattered over slabs of another group, that group
moves its blocks together and gives a slab up. So what counts is only how many slabs the blocks with holders fill when
they lie close, and that is what `can_hold` adds up: its answer is exact.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice, takewhile, zip_longest
from operator import itemgetter
from sys import maxsize

from quire.memory.eviction import EvictionPolicy
from quire.memory.ops import BlockCopy, Tier
from quire.memory.pool import NULL_BLOCK, BlockPool
from quire.memory.retention import HintedLast, Retention
from quire.memory.slabs import SlabLayout, lay_out

# Whether something carries the hint, and since when it has been idle: the least goes first.
Age = tuple[bool, int]
NEVER: Age = (True, maxsize)


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

    def rooms(self, needs: Sequence[int]) -> list[int]:
        """Return for each group the blocks that it could have beyond its used ones if all others got what they need.

        `can_hold(needs)` exactly when no group needs more than that; negative when even nothing is too much.
        """
        filled = [self.num_slabs_for(idx, pool.num_used + needs[idx]) for idx, pool in enumerate(self.pools)]
        left = self.layout.num_slabs - sum(filled)
        per_slab = self.layout.blocks_per_slab
        return [(left + filled[idx]) * per_slab[idx] - pool.num_used for idx, pool in enumerate(self.pools)]

    def ticks(self, count: int) -> range:
        """Return the next moments; blocks that became idle at an earlier one are older."""
        start = self._clock
        self._clock += count
        return range(start, self._clock)

    def make_room(self, wanted_by: Loan, num_blocks: int) -> None:
        """Have slabs returned for a group that lacks blocks, or leave it to the group to evict some of its own.

        What has been idle for longest goes first, and no more of it than is wanted and older than all else; but what
        carries the hint goes after what does not.
        """
        own = wanted_by.oldest_idle()
        others = [(loan.oldest_resting(), loan) for loan in self.loans if loan is not wanted_by and loan.resting]
        others.sort(key=itemgetter(0))
        rests = [*map(itemgetter(0), others), NEVER, NEVER]
        if rests[0] < own:
            most = self.num_slabs_for(wanted_by.group_idx, num_blocks)
            others[0][1].return_resting_slabs(most, min(own, rests[1]))
        elif own < NEVER:
            wanted_by.evict_oldest(num_blocks, rests[0])
        else:
            self._scattered(wanted_by).vacate_a_slab()
            assert self.free_slabs, "a slab that is vacated is returned"

    def _scattered(self, wanted_by: Loan) -> Loan:
        """Return another group whose used blocks would fill fewer slabs than it has."""
        for loan in self.loans:
            if loan is not wanted_by and len(loan.used) > self.num_slabs_for(loan.group_idx, loan.pool.num_used):
                return loan
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
            if arena.free_slabs:
                self._borrow(arena.num_slabs_for(self.group_idx, count - len(free)))
            else:
                arena.make_room(self, count - len(free))

    def took(self, block_ids: Sequence[int]) -> None:
        """Note that free blocks have holders now."""
        used, resting = self.used, self.resting
        for slab in self._slabs_of(block_ids):
            if slab in resting:
                del resting[slab]
            used[slab] += 1

    def woke(self, block_ids: Sequence[int]) -> None:
        """Note that idle blocks have holders now."""
        idle, since = self._idle, self._idle_since
        for block_id, slab in zip(block_ids, self._slabs_of(block_ids), strict=True):
            del since[block_id]
            idle[slab] -= 1
        self.took(block_ids)

    def rested(self, block_ids: Sequence[int]) -> None:
        """Note that blocks have no holders any more, but are published."""
        used, idle, resting = self.used, self._idle, self.resting
        moments = self._arena.ticks(len(block_ids))
        self._idle_since.update(zip(block_ids, moments, strict=True))
        for slab, now in zip(self._slabs_of(block_ids), moments, strict=True):
            idle[slab] += 1
            used[slab] = left = used[slab] - 1
            if not left:
                resting[slab] = now

    def rested_anew(self, block_id: int) -> None:
        """Note that an idle block counts as if it had just become idle; so does its slab, if that is at rest."""
        (slab,) = self._slabs_of((block_id,))
        (now,) = self._arena.ticks(1)
        self._idle_since[block_id] = now
        if self.resting.pop(slab, None) is not None:
            self.resting[slab] = now

    def freed(self, block_ids: Sequence[int]) -> None:
        """Note that blocks hold nothing any more; slabs of which all blocks are free go back."""
        used, emptied = self.used, []
        for slab in self._slabs_of(block_ids):
            used[slab] -= 1
            if not used[slab]:
                if self._idle[slab]:
                    self.resting[slab] = self._arena.ticks(1)[0]
                else:
                    emptied.append(slab)
        if emptied:
            self._give_back(emptied)

    # ---- what the arena asks for ----

    def oldest_idle(self) -> Age:
        """Return the age of the pool's next victim, `NEVER` without one."""
        return self._age(self.pool.next_victim()) if self._idle_since else NEVER

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
        slabs = [slab for age, slab in self._next_resting(most) if age < before]
        blocks = self._arena.layout.blocks_in(self.group_idx, slabs)
        self._evict([block_id for block_id in blocks if block_id in self._idle_since])
        self._give_back(slabs)

    def evict_oldest(self, most: int, before: Age) -> None:
        """Evict the next victims.

        Args:
            most: blocks.
            before: none from the first on that does not go before what is of that age.
        """
        victims = self.pool.next_victims(most)
        hints, since = self._arena.retention.of_group[self.group_idx], self._idle_since
        if hints:
            victims = list(takewhile(lambda block_id: self._age(block_id) < before, victims))
        elif not before[0]:
            moment = before[1]
            victims = list(takewhile(lambda block_id: since[block_id] < moment, victims))
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
        return block_id in self._arena.retention.of_group[self.group_idx], self._idle_since[block_id]

    def _next_resting(self, most: int) -> list[tuple[Age, int]]:
        """Return the slabs at rest that are to go first, each with its age; those with the hint come last."""
        if not self._arena.retention.of_group[self.group_idx]:
            return [((False, since), slab) for slab, since in islice(self.resting.items(), most)]
        is_hinted = self._arena.retention.is_in_slab
        plain, hinted = [], []
        for slab, since in self.resting.items():
            if is_hinted(self.group_idx, slab):
                hinted.append(((True, since), slab))
            else:
                plain.append(((False, since), slab))
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
        for counts in (self.used, self._idle):
            counts.update(dict.fromkeys(slabs, 0))
        # Below all else: what is left over is then part of one slab, of which another part is taken.
        slabs.reverse()
        self.pool.free[:0] = reversed(self._arena.layout.blocks_in(self.group_idx, slabs))

    def _evict(self, block_ids: Sequence[int]) -> None:
        self.pool.evict(block_ids)
        self.pool.free += block_ids
        idle, since = self._idle, self._idle_since
        for block_id, slab in zip(block_ids, self._slabs_of(block_ids), strict=True):
            del since[block_id]
            idle[slab] -= 1
            if not idle[slab]:
                self.resting.pop(slab, None)

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
        self.resting.pop(target_slab, None)
        tier = self._arena.tier
        self._arena.moves.append(BlockCopy(self.group_idx, block_id, elsewhere, tier, tier))

    def _give_back(self, slabs: list[int]) -> None:
        """Return slabs of which all blocks are free."""
        gone, free = set(slabs), self.pool.free
        self.pool.free = [
            block_id for block_id, slab in zip(free, self._slabs_of(free), strict=True) if slab not in gone
        ]
        for slab in slabs:
            del self.used[slab], self._idle[slab]
            self.resting.pop(slab, None)
            self._arena.free_slabs.append(slab)
