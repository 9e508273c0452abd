"""The host tier: blocks of sequences that are swapped out, and published blocks that were evicted from the device.

It has an arena of its own with the device's block sizes, so its blocks are held, published, hit and evicted by the
same rules. A published device block is copied to it before it goes (*demoted*), where the host has room; what was
demoted longest ago makes room for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.memory.groups.cache_group import CacheGroup
from quire.memory.pool.arena import Arena, build_arena
from quire.memory.pool.eviction import PolicyMaker
from quire.memory.pool.idle_blocks import RetentionPriority
from quire.memory.pool.pool import NULL_BLOCK
from quire.memory.prefix.radix_tree import RadixTree
from quire.memory.results import BlockCopy, Tier


@dataclass(slots=True)
class Traffic:
    """Blocks that were copied between the tiers, since the start.

    Args:
        num_swap_outs: to the host, of sequences that were swapped out.
        num_swap_ins: to the device, when they came back.
        num_demotions: to the host, before they were evicted from the device.
        num_promotions: to the device, for hits.
    """

    num_swap_outs: int = 0
    num_swap_ins: int = 0
    num_demotions: int = 0
    num_promotions: int = 0


class HostTier:
    """The blocks on the host.

    Args:
        device: the arena of the blocks on the device; its movements and those here are one ordered list.
        groups: the cache groups, with their blocks on the device.
        num_bytes: of the host's memory.
        policy: makes the eviction policy of a group.
        tree: where blocks are published.

    Attributes:
        arena: of the blocks.
        groups: the cache groups, with their blocks on the host.
        num_sequences: those that are swapped out.
        traffic: what was copied.

    Raises:
        ValueError: the bytes hold no slab.
    """

    __slots__ = ("arena", "groups", "num_sequences", "traffic")

    def __init__(
        self,
        device: Arena,
        groups: Sequence[CacheGroup],
        num_bytes: int,
        policy: PolicyMaker | None,
        tree: RadixTree,
    ) -> None:
        self.arena = build_arena(device.layout.block_bytes, None, num_bytes, policy, tree, tier=Tier.HOST)
        self.arena.moves = device.moves
        self.groups = tuple(CacheGroup(group.spec, pool) for group, pool in zip(groups, self.arena.pools, strict=True))
        self.num_sequences = 0
        self.traffic = Traffic()
        for idx, group in enumerate(groups):
            group.pool.keeper = HostSink(self, idx, group)


class HostSink:
    """Keeps what one group's device pool evicts.

    Args:
        host: where to.
        group_idx: the group.
        group: with its blocks on the device.
    """

    __slots__ = ("_group_idx", "_host", "_pool")

    def __init__(self, host: HostTier, group_idx: int, group: CacheGroup) -> None:
        self._host = host
        self._group_idx = group_idx
        self._pool = group.pool

    def keep(self, block_ids: Sequence[int]) -> None:
        """Copy published blocks that are about to be evicted to the host, as long as it has room.

        A block that is published there already counts as used again, and is not copied. Tails and blocks of low
        retention priority are not worth a copy.
        """
        arena, idx, not_kept = self._host.arena, self._group_idx, self._pool.idle.queues[RetentionPriority.LOW]
        pool = arena.pools[idx]
        needs = [int(other == idx) for other in range(len(arena.pools))]
        for block_id in block_ids:
            place = self._pool.index.position_of(block_id)
            assert place is not None, "only published blocks are evicted"
            if place[0].is_tail or block_id in not_kept:
                continue
            host_ids = [pool.index.at(place)]
            if host_ids != [NULL_BLOCK]:
                pool.retain(host_ids)
            elif arena.fits(needs):
                host_ids = pool.take(1)
                arena.moves.append(BlockCopy(idx, block_id, host_ids[0], Tier.DEVICE, Tier.HOST))
                pool.index.put(place, host_ids[0])
                self._host.traffic.num_demotions += 1
            else:
                continue
            pool.release(host_ids)
