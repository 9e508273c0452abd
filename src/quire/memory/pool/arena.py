"""The arena: one range of bytes that all cache groups share, in slabs.

A group that needs blocks gets, in this order: a free slab; the blocks that have been idle for longest, its own or, in
whole slabs, another group's; and a slab of another group whose free blocks are scattered over its slabs
(fragmentation), after that group has compacted them. So capacity depends only on the number of slabs that used blocks
fill when they are packed densely. `fits` adds these up: its answer is exact.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain, groupby, zip_longest

from quire.errors import InvariantViolation
from quire.memory.pool.eviction import PolicyMaker
from quire.memory.pool.idle_blocks import Age, IdleBlocks, RetentionPriority
from quire.memory.pool.idle_queue import Ticker
from quire.memory.pool.multi_block_slabs import MultiBlockSlabs
from quire.memory.pool.pool import NULL_BLOCK, BlockPool
from quire.memory.pool.retention import Retention
from quire.memory.pool.single_block_slabs import SingleBlockSlabs
from quire.memory.pool.slab_layout import SlabLayout, lay_out
from quire.memory.pool.slab_supply import GroupSlabs, SlabSupply, ages_of_idle
from quire.memory.prefix.published import PublishedBlocks
from quire.memory.prefix.radix_tree import RadixTree
from quire.memory.results import BlockCopy, Tier


class Arena:
    """The pools of all groups, and the slabs that they share.

    With one group a slab is a block, and the pool has all blocks from the start: it has no `source`, and the slab
    classes are not used.
    """

    __slots__ = ("_is_uniform", "clock", "free_slabs", "group_slabs", "layout", "moves", "pools", "retention", "tier")

    def __init__(
        self,
        layout: SlabLayout,
        pools: Sequence[BlockPool],
        retention: Retention | None = None,
        tier: Tier = Tier.DEVICE,
        clock: Ticker | None = None,
        moves: list[BlockCopy] | None = None,
    ) -> None:
        self.layout = layout
        self.tier = tier
        self.retention = retention or Retention(layout, 0)
        self.pools = tuple(pools)
        # True if a slab is one block in every group.
        self._is_uniform = set(layout.blocks_per_slab) == {1}
        # A stack with the lowest slab on top.
        self.free_slabs = list(range(layout.num_slabs - 1, -1, -1)) if len(pools) > 1 else []
        self.moves: list[BlockCopy] = [] if moves is None else moves
        self.clock = clock or Ticker()
        supply = SlabSupply(layout, self.free_slabs, self.moves, tier, self.clock)
        group_slabs: list[GroupSlabs] = []
        for idx, (pool, per_slab) in enumerate(zip(self.pools, layout.blocks_per_slab, strict=True)):
            slabs = (SingleBlockSlabs if per_slab == 1 else MultiBlockSlabs)(supply, idx, pool, self.reclaim)
            group_slabs.append(slabs)
            if len(pools) > 1:
                pool.source = slabs
        self.group_slabs = tuple(group_slabs)

    def num_slabs_for(self, group_idx: int, num_blocks: int) -> int:
        """Return the number of slabs that blocks of a group fill."""
        return -(-num_blocks // self.layout.blocks_per_slab[group_idx])

    def fits(self, needs: Sequence[int]) -> bool:
        """Return whether all groups together can take `needs` more blocks."""
        # Free blocks in a group's own slabs need no further slab.
        for need, pool in zip(needs, self.pools, strict=True):
            if need > len(pool.free):
                break
        else:
            return True
        if self._is_uniform:
            return sum(needs) + sum([pool.num_used for pool in self.pools]) <= self.layout.num_slabs
        return sum(self._filled(needs)) <= self.layout.num_slabs

    def available_blocks(self, needs: Sequence[int], num_kept_free: int = 0) -> list[int]:
        """Return for each group the number of blocks that it could still take if all other groups took their needs.

        With `num_kept_free` 0, `fits(needs)` is True if and only if no group needs more than that. The number is
        negative if the other groups' needs alone exceed the memory.
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
        """Return for each group the number of slabs that its used blocks and `needs` more blocks fill."""
        return self.layout.filled([pool.num_used + need for pool, need in zip(self.pools, needs, strict=True)])

    def reclaim(self, own_idx: int, num_blocks: int) -> None:
        """Evict idle blocks for a group that lacks blocks: its own blocks, and the blocks of other groups' idle slabs.

        Blocks are evicted by retention priority, the lowest first, then by the time for which they have been idle. If
        no block is idle, another group compacts a slab: its used blocks move to other slabs.
        """
        own_slabs, per_slab = self.group_slabs[own_idx], self.layout.blocks_per_slab[own_idx]
        # An eviction policy may evict a younger block before an older one.
        ages = [
            list(accumulate(own_slabs.pool.idle.ages_of_victims(num_blocks), max))
            if slabs is own_slabs
            else ages_of_idle(slabs.idle_slabs, -(-num_blocks // per_slab))
            for slabs in self.group_slabs
        ]
        if per_slab == 1 and self.pools[0].keeper is None:
            first = sorted(chain.from_iterable(ages))[:num_blocks]
            runs = [(idx, bisect_right(group_ages, first[-1])) for idx, group_ages in enumerate(ages)] if first else []
        else:
            # The tier below stores evicted blocks, in this order.
            chosen = self._first_of(ages, own_idx, num_blocks)
            runs = [(idx, len(list(run))) for idx, run in groupby(chosen)]
        if not runs:
            self._scattered(own_slabs).compact_slab()
        for idx, count in runs:
            if idx == own_idx:
                own_slabs.evict_oldest(count)
            elif count:
                self.group_slabs[idx].return_idle_slabs(count)

    def _first_of(self, ages: Sequence[Sequence[Age]], own_idx: int, num_blocks: int) -> list[int]:
        """Return the group of each victim, in order of eviction, until group `own_idx` has the blocks that it lacks."""
        chosen: list[int] = []
        for _, idx in sorted((age, idx) for idx, group_ages in enumerate(ages) for age in group_ages):
            if num_blocks <= 0:
                break
            chosen.append(idx)
            num_blocks -= 1 if idx == own_idx else self.layout.blocks_per_slab[own_idx]
        return chosen

    def _scattered(self, own_slabs: GroupSlabs) -> GroupSlabs:
        """Return another group whose used blocks would fill fewer slabs than it has."""
        for slabs in self.group_slabs:
            if slabs is not own_slabs and slabs.is_scattered():
                return slabs
        raise InvariantViolation("M1", "more blocks are taken than `fits` allows")

    def evict_last(self, tables: Sequence[Sequence[int]]) -> None:
        """Retain the published blocks of a sequence, so that they are evicted last.

        Tails are added first, in all groups, so that they lose the hint before the heads do.
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
    moves: list[BlockCopy] | None = None,
) -> Arena:
    """Return an empty arena."""
    if num_blocks is not None and len(set(block_bytes)) > 1:
        raise ValueError(f"num_bytes must be set for an arena with blocks of {sorted(set(block_bytes))} bytes")
    num_slabs = None if num_blocks is None else num_blocks * len(block_bytes)
    layout = lay_out(block_bytes, num_bytes=num_bytes, num_slabs=num_slabs)
    free_ids = range(layout.num_slabs, 0, -1) if len(block_bytes) == 1 else range(0)
    retention = Retention(layout, retention_limit)
    pools, clock = [], Ticker()
    for idx in range(len(block_bytes)):
        idle = IdleBlocks(policy, clock, retention, idx)
        slot = idx if tier is Tier.DEVICE else len(block_bytes) + idx
        pools.append(BlockPool(PublishedBlocks(tree, slot, layout.num_ids(idx)), idle, free_ids, clock))
    return Arena(layout, pools, retention, tier, clock, moves)
