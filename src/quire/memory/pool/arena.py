"""The arena: one range of bytes that all cache groups share, lent to them in slabs.

A group that needs blocks gets, in this order: a slab that nobody has; the blocks that have been idle for longest,
its own or, by the slab, another group's; and when what is free lies scattered over slabs of another group, that group
moves its blocks together and gives a slab up. So what counts is only how many slabs the blocks with holders fill when
they lie close, and that is what `fits` adds up: its answer is exact.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain, groupby, zip_longest

from quire.errors import InvariantViolation
from quire.memory.pool.eviction import PolicyMaker
from quire.memory.pool.group_slabs import GroupSlabs
from quire.memory.pool.idle_blocks import Age, IdleBlocks, RetentionPriority
from quire.memory.pool.idle_queue import Ticker
from quire.memory.pool.pool import NULL_BLOCK, BlockPool
from quire.memory.pool.retention import Retention
from quire.memory.pool.slab_layout import SlabLayout, lay_out
from quire.memory.prefix.published import PublishedBlocks
from quire.memory.prefix.radix_tree import RadixTree
from quire.memory.results import BlockCopy, Tier


class Arena:
    """The slabs, and the groups that they are lent to.

    With one group a slab is a block, and the group has them all from the start.

    Args:
        layout: of the bytes.
        pools: of the groups; when there are several, they have no blocks of their own.
        retention: which blocks are to be evicted last; None is none.
        tier: where the bytes are.
        clock: of the pools.

    Attributes:
        moves: blocks that were moved and that tables still name by their old ids, and copies that were made of blocks
            before they went; the manager empties it. Arenas of several tiers share one list: the order counts.
    """

    __slots__ = ("_is_uniform", "clock", "free_slabs", "layout", "loans", "moves", "pools", "retention", "tier")

    def __init__(
        self,
        layout: SlabLayout,
        pools: Sequence[BlockPool],
        retention: Retention | None = None,
        tier: Tier = Tier.DEVICE,
        clock: Ticker | None = None,
    ) -> None:
        self.layout = layout
        self.tier = tier
        self.retention = retention or Retention(layout, 0)
        self.pools = tuple(pools)
        # Slabs are blocks, of whatever group.
        self._is_uniform = set(layout.blocks_per_slab) == {1}
        # A stack with the lowest slab on top.
        self.free_slabs = list(range(layout.num_slabs - 1, -1, -1)) if len(pools) > 1 else []
        self.moves: list[BlockCopy] = []
        self.clock = clock or Ticker()
        self.loans = tuple(GroupSlabs(self, idx, pool) for idx, pool in enumerate(self.pools))

    def num_slabs_for(self, group_idx: int, num_blocks: int) -> int:
        """Return the slabs that so many blocks of a group fill."""
        return -(-num_blocks // self.layout.blocks_per_slab[group_idx])

    def fits(self, needs: Sequence[int]) -> bool:
        """Say whether every group can have so many blocks with holders more than it has now."""
        # What is free in a group's own slabs takes no slab from anybody.
        for need, pool in zip(needs, self.pools, strict=True):
            if need > len(pool.free):
                break
        else:
            return True
        if self._is_uniform:
            return sum(needs) + sum([pool.num_used for pool in self.pools]) <= self.layout.num_slabs
        return sum(self._filled(needs)) <= self.layout.num_slabs

    def available_blocks(self, needs: Sequence[int], num_kept_free: int = 0) -> list[int]:
        """Return for each group the blocks that it could have beyond its used ones if all others got what they need.

        `fits(needs)` exactly when no group needs more than that; negative when even nothing is too much.

        Args:
            needs: blocks of each group.
            num_kept_free: slabs that nobody may count on.
        """
        num_slabs = self.layout.num_slabs - num_kept_free
        if self._is_uniform:
            left = num_slabs - sum(needs) - sum([pool.num_used for pool in self.pools])
            return [left + need for need in needs]
        filled = self._filled(needs)
        left = num_slabs - sum(filled)
        return [
            (left + count) * per_slab - pool.num_used
            for count, per_slab, pool in zip(filled, self.layout.blocks_per_slab, self.pools, strict=True)
        ]

    def _filled(self, needs: Sequence[int]) -> list[int]:
        """Return for each group the slabs that its used blocks and so many more fill."""
        return self.layout.filled([pool.num_used + need for pool, need in zip(self.pools, needs, strict=True)])

    def reclaim(self, wanted_by: GroupSlabs, num_blocks: int) -> None:
        """Evict what is idle for a group that lacks blocks: its own blocks, and slabs at rest of other groups.

        What has the lowest retention priority goes first, and of that what has been idle for longest; no more of it
        than is wanted. Where nothing is idle, a slab whose used blocks fit into others is vacated.
        """
        own_idx = wanted_by.group_idx
        per_slab = self.layout.blocks_per_slab[own_idx]
        # An eviction policy may have a younger block before an older one.
        ages = [
            list(accumulate(loan.pool.idle.ages_of_victims(num_blocks), max))
            if loan is wanted_by
            else loan.ages_of_resting(-(-num_blocks // per_slab))
            for loan in self.loans
        ]
        if per_slab == 1 and self.pools[0].keeper is None:
            first = sorted(chain.from_iterable(ages))[:num_blocks]
            runs = [(idx, bisect_right(each, first[-1])) for idx, each in enumerate(ages)] if first else []
        else:
            # A tier below takes over what is evicted, in this very order.
            chosen = self._first_of(ages, own_idx, num_blocks)
            runs = [(idx, len(list(run))) for idx, run in groupby(chosen)]
        if not runs:
            self._scattered(wanted_by).compact_slab()
        for idx, count in runs:
            if idx == own_idx:
                wanted_by.evict_oldest(count)
            elif count:
                self.loans[idx].return_resting_slabs(count)

    def _first_of(self, ages: Sequence[Sequence[Age]], own_idx: int, num_blocks: int) -> list[int]:
        """Return the groups of what goes first, in order, until a group has so many blocks.

        Args:
            ages: of the blocks of the group itself and of other groups' slabs, each in order.
            own_idx: the group.
            num_blocks: that it wants.
        """
        chosen: list[int] = []
        for _, idx in sorted((age, idx) for idx, each in enumerate(ages) for age in each):
            if num_blocks <= 0:
                break
            chosen.append(idx)
            num_blocks -= 1 if idx == own_idx else self.layout.blocks_per_slab[own_idx]
        return chosen

    def _scattered(self, wanted_by: GroupSlabs) -> GroupSlabs:
        """Return another group whose used blocks would fill fewer slabs than it has."""
        for loan in self.loans:
            if loan is not wanted_by and loan.is_scattered():
                return loan
        raise InvariantViolation("M1", "more blocks are taken than can_hold allows")

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
                        self.pools[other].set_priority(dropped, RetentionPriority.DEFAULT)


def build_arena(
    block_bytes: Sequence[int],
    num_blocks: int | None,
    num_bytes: int | None,
    policy: PolicyMaker | None,
    tree: RadixTree,
    *,
    retention_limit: int = 0,
    tier: Tier = Tier.DEVICE,
) -> Arena:
    """Return an arena with nothing in it.

    Args:
        block_bytes: of each group.
        num_blocks: for each group, when all blocks are of the same bytes; or
        num_bytes: the whole range.
        policy: makes the eviction policy of a group; None is LRU.
        tree: where blocks are published; the groups of the device have its first slots, those of the host the next.
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
    pools, clock = [], Ticker()
    for idx in range(len(block_bytes)):
        idle = IdleBlocks(policy, clock, retention, idx)
        slot = idx if tier is Tier.DEVICE else len(block_bytes) + idx
        pools.append(BlockPool(PublishedBlocks(tree, slot, layout.num_ids(idx)), idle, own, clock))
    return Arena(layout, pools, retention, tier, clock)
