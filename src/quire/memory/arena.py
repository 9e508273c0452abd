"""The arena: one range of bytes that all cache groups share, lent to them in slabs.

A group that needs blocks gets, in this order: a slab that nobody has; the blocks that have been idle for longest,
its own or, by the slab, another group's; and when what is free lies scattered over slabs of another group, that group
moves its blocks together and gives a slab up. So what counts is only how many slabs the blocks with holders fill when
they lie close, and that is what `can_hold` adds up: its answer is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from operator import itemgetter

from quire.errors import InvariantViolation
from quire.memory.eviction import PolicyMaker
from quire.memory.loan import NEVER, Loan
from quire.memory.ops import BlockCopy, Tier
from quire.memory.pool import NULL_BLOCK, BlockPool
from quire.memory.prefix_index import PrefixIndex
from quire.memory.prefix_tree import PrefixTree
from quire.memory.rest_queue import Clock
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
        clock: Clock | None = None,
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
        self.clock = clock or Clock()
        self.loans = tuple(Loan(self, idx, pool) for idx, pool in enumerate(self.pools))

    def num_slabs_for(self, group_idx: int, num_blocks: int) -> int:
        """Return the slabs that so many blocks of a group fill."""
        return -(-num_blocks // self.layout.blocks_per_slab[group_idx])

    def can_hold(self, needs: Sequence[int]) -> bool:
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

    def rooms(self, needs: Sequence[int], num_kept_free: int = 0) -> list[int]:
        """Return for each group the blocks that it could have beyond its used ones if all others got what they need.

        `can_hold(needs)` exactly when no group needs more than that; negative when even nothing is too much.

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

    def _scattered(self, wanted_by: Loan) -> Loan:
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
                        self.pools[other].rest_anew(dropped)


def build_arena(
    block_bytes: Sequence[int],
    num_blocks: int | None,
    num_bytes: int | None,
    policy: PolicyMaker,
    tree: PrefixTree,
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
    pools, clock = [], Clock()
    for idx in range(len(block_bytes)):
        idle: PolicyMaker = partial(HintedLast, policy, retention, idx) if retention_limit else policy
        slot = idx if tier is Tier.DEVICE else len(block_bytes) + idx
        pools.append(BlockPool(PrefixIndex(tree, slot, layout.num_ids(idx)), idle, own, clock))
    return Arena(layout, pools, retention, tier, clock)
