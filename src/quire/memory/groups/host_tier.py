"""The host tier: blocks of swapped sequences, and published blocks that were evicted from the device.

It has its own arena with the device's block sizes, so its blocks are held, published, hit and evicted by the same
rules. A published device block is copied to the host when it is evicted (*demoted*), if the host has room for it after
evicting its own idle blocks.
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
    """Counters of blocks copied between the tiers since the start.

    Args:
        num_swap_outs: blocks copied to the host by swapping out.
        num_swap_ins: blocks copied to the device by swapping in.
        num_demotions: blocks copied to the host when the device evicted them.
        num_promotions: blocks copied to the device for hits.
    """

    num_swap_outs: int = 0
    num_swap_ins: int = 0
    num_demotions: int = 0
    num_promotions: int = 0


class HostTier:
    """The blocks on the host."""

    __slots__ = ("arena", "groups", "num_sequences", "traffic")

    def __init__(
        self,
        device: Arena,
        groups: Sequence[CacheGroup],
        num_bytes: int,
        policy: PolicyMaker | None,
        tree: RadixTree,
    ) -> None:
        self.arena = build_arena(
            device.layout.block_bytes, None, num_bytes, policy, tree, tier=Tier.HOST, moves=device.moves
        )
        self.groups = tuple(CacheGroup(group.spec, pool) for group, pool in zip(groups, self.arena.pools, strict=True))
        self.num_sequences = 0
        self.traffic = Traffic()
        for idx, group in enumerate(groups):
            group.pool.keeper = HostSink(self, idx, group)


class HostSink:
    """Copies the published blocks that one group's device pool evicts to the host."""

    __slots__ = ("_group_idx", "_host", "_pool")

    def __init__(self, host: HostTier, group_idx: int, group: CacheGroup) -> None:
        self._host = host
        self._group_idx = group_idx
        self._pool = group.pool

    def keep(self, block_ids: Sequence[int]) -> None:
        """Copy published blocks that are about to be evicted to the host, as long as it has room.

        A block that is already published on the host becomes the most recently used there, without a copy. Tails and
        blocks of low retention priority are not copied.
        """
        arena, idx, low = self._host.arena, self._group_idx, self._pool.idle.queues[RetentionPriority.LOW]
        pool = arena.pools[idx]
        needs = [int(other == idx) for other in range(len(arena.pools))]
        for block_id in block_ids:
            position = self._pool.index.position_of(block_id)
            assert position is not None, "only published blocks are evicted"
            if position[0].is_tail or block_id in low:
                continue
            host_ids = [pool.index.at(position)]
            if host_ids != [NULL_BLOCK]:
                pool.retain(host_ids)
            elif arena.fits(needs):
                host_ids = pool.take(1)
                arena.moves.append(BlockCopy(idx, block_id, host_ids[0], Tier.DEVICE, Tier.HOST))
                pool.index.put(position, host_ids[0])
                self._host.traffic.num_demotions += 1
            else:
                continue
            pool.release(host_ids)
