"""The disk below the tiers: what is loaded from it into host memory, and what is saved when the host evicts it.

Memory asks no disk. Somebody else knows what is stored there; memory says what of it a hit lacks (`find_loads`). Who
then reads it and finds it whole gives it back with a ticket (`adopt`): it gets a host block and is published there, and
a hit finds it as it finds all else on the host.

```
 device, host   [ 0 ][ 1 ]          [ 4 ]
 disk                     [ 2 ][ 3 ][ 4 ][ 5 ]      for a hit of 6 blocks, 2, 3 and 5 are to be loaded
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.memory.chain import Link, TokenChain
from quire.memory.groups import CacheGroup
from quire.memory.ops import BlockCopy, MemoryOps, StoredBlock, Tier
from quire.memory.pool import BlockPool
from quire.memory.prefix_index import PrefixIndex
from quire.memory.tables import BlockTables


class DiskLoad(NamedTuple):
    """A block of a chain that is on disk and on no tier above.

    Args:
        block_idx: its place in the chain.
        block: what it is.
    """

    block_idx: int
    block: StoredBlock


class FetchedBlock(NamedTuple):
    """A block of a chain that was read from disk and found whole.

    Args:
        group_idx: the cache group.
        block_idx: its place in the chain.
        ticket: the number under which the data plane has its bytes.
    """

    group_idx: int
    block_idx: int
    ticket: int


class Archive:
    """Has what the host evicts saved to disk.

    Args:
        moves: the movements of the tiers, in order.
        pools: of the host, one for each cache group.

    Attributes:
        saves: the blocks that movements bring to disk; a movement's `dst_id` is a place in this list.
        num_loads: blocks that were adopted.
        num_saves: blocks that were evicted from the host, which may have been on disk already.
    """

    __slots__ = ("_moves", "num_loads", "num_saves", "saves")

    def __init__(self, moves: list[BlockCopy], pools: Sequence[BlockPool]) -> None:
        self._moves = moves
        self.saves: list[StoredBlock] = []
        self.num_loads = 0
        self.num_saves = 0
        for idx, pool in enumerate(pools):
            pool.keeper = Shelf(self, idx, pool)

    def save(self, group_idx: int, block_id: int, link: Link) -> None:
        """Ask for a host block to be saved before anybody writes to it."""
        self._moves.append(BlockCopy(group_idx, block_id, len(self.saves), Tier.HOST, Tier.DISK))
        self.saves.append(describe(group_idx, link))
        self.num_saves += 1

    def forget(self, pending: list[BlockCopy]) -> None:
        """Save nothing of what was asked for and not handed over yet.

        Args:
            pending: the movements among which those to disk are.
        """
        pending[:] = [copy for copy in pending if copy.dst_tier is not Tier.DISK]
        self.saves = []


class Shelf:
    """Keeps what one group's host pool evicts.

    Args:
        archive: where to.
        group_idx: the group.
        pool: its blocks on the host.
    """

    __slots__ = ("_archive", "_group_idx", "_pool")

    def __init__(self, archive: Archive, group_idx: int, pool: BlockPool) -> None:
        self._archive = archive
        self._group_idx = group_idx
        self._pool = pool

    def keep(self, block_ids: Sequence[int]) -> None:
        """Have published blocks that are about to be evicted saved."""
        for block_id in block_ids:
            link = self._pool.index.link_of(block_id)
            assert link is not None, "only published blocks are evicted"
            self._archive.save(self._group_idx, block_id, link)


class _Reach:
    """What of one chain's group is published on some tier, or stored: see `quire.memory.specs.PublishedRun`."""

    __slots__ = ("_chain", "_group_idx", "_holds", "_indexes", "_known")

    def __init__(
        self, indexes: Sequence[PrefixIndex], group_idx: int, chain: TokenChain, holds: Callable[[StoredBlock], bool]
    ) -> None:
        self._indexes = indexes
        self._group_idx = group_idx
        self._chain = chain
        self._holds = holds
        self._known: dict[int, bool] = {}

    def leading(self, limit: int) -> int:
        """Return how many of the first `limit` blocks are there without a gap."""
        return next((idx for idx in range(limit) if not self._is_there(idx)), limit)

    def last_gap(self, start: int, end: int) -> int:
        """Return the last block in `[start, end)` that is not there, or -1."""
        return next((idx for idx in range(end - 1, start - 1, -1) if not self._is_there(idx)), -1)

    def load(self, block_idx: int) -> DiskLoad | None:
        """Return what must be loaded for a block to be on some tier, None where it is."""
        if any(index.holds(self._chain, block_idx) for index in self._indexes):
            return None
        return DiskLoad(block_idx, describe(self._group_idx, self._chain.links(block_idx + 1)[block_idx]))

    def _is_there(self, block_idx: int) -> bool:
        if block_idx not in self._known:
            load = self.load(block_idx)
            self._known[block_idx] = load is None or self._holds(load.block)
        return self._known[block_idx]


def describe(group_idx: int, link: Link) -> StoredBlock:
    """Return what a published block is, for the disk."""
    digest, tokens, parent = link
    assert parent is not None, "the root is no block"
    return StoredBlock(group_idx, digest, tokens, parent[0])


def find_loads(
    tables: BlockTables, chain: TokenChain, limit: int, holds: Callable[[StoredBlock], bool]
) -> list[DiskLoad]:
    """Say what must be loaded for the longest hit that all tiers and the disk can serve together.

    Where the host has no room for that much, it is a shorter hit.

    Args:
        tables: with a host tier.
        chain: of the tokens.
        limit: blocks of the hit at most.
        holds: says whether a block is on disk.

    Returns:
        The blocks, in the order of the chain.
    """
    assert tables.host is not None
    groups = tables.groups
    tiers = zip(groups, tables.host.groups, strict=True)
    views = [
        _Reach([device.pool.index, host.pool.index], idx, chain, holds) for idx, (device, host) in enumerate(tiers)
    ]
    while True:
        length = _agree(groups, views, limit)
        found = [
            [load for block_idx in range(group.num_dead(length * group.spec.block_size), length)
             if (load := view.load(block_idx)) is not None]
            for group, view in zip(groups, views, strict=True)
        ]  # fmt: skip
        if tables.host.arena.can_hold([len(loads) for loads in found]):
            return sorted((load for loads in found for load in loads), key=lambda load: load.block_idx)
        limit = length * 3 // 4


def _agree(groups: Sequence[CacheGroup], views: Sequence[_Reach], length: int) -> int:
    """Return the longest prefix, in blocks and at most `length`, that every group can serve."""
    before = -1
    while before != length:
        before = length
        for group, view in zip(groups, views, strict=True):
            length = group.spec.longest_hit(view, length)
    return length


def adopt(tables: BlockTables, chain: TokenChain, fetched: Sequence[FetchedBlock]) -> list[int]:
    """See `KVCacheManager.adopt`."""
    host = tables.host
    assert host is not None
    tables.version += 1
    adopted, links = [], []
    for group_idx, block_idx, ticket in fetched:
        pool = host.groups[group_idx].pool
        (link,) = chain.canonical_links(block_idx, block_idx + 1)
        if pool.index.get(link[0]) is not None:
            continue
        if not host.arena.can_hold([int(idx == group_idx) for idx in range(len(tables.groups))]):
            break
        (block_id,) = tables.take(group_idx, 1, Tier.HOST)
        tables.pending_copies.append(BlockCopy(group_idx, ticket, block_id, Tier.DISK, Tier.HOST))
        pool.index.add(link, block_id)
        adopted.append(ticket)
        links.append((pool, link))
    # Until here each had a holder, so that none made room for another; to take one may have moved the others.
    for pool, link in reversed(links):
        entry = pool.index.get(link[0])
        assert entry is not None
        pool.release(entry[:1])
    return adopted


def save_all(tables: BlockTables) -> MemoryOps:
    """See `KVCacheManager.saving_ops`."""
    copies: list[BlockCopy] = []
    saves: list[StoredBlock] = []
    for tier in (Tier.HOST, Tier.DEVICE):
        for idx, group in enumerate(tables.groups_on(tier)):
            pool = group.pool
            held = [block_id for block_id, _ in pool.index.items() if pool.ref_counts[block_id]]
            for block_id in pool.idle.victims(len(pool.idle)) + held:
                link = pool.index.link_of(block_id)
                assert link is not None, "idle blocks are published"
                copies.append(BlockCopy(idx, block_id, len(saves), tier, Tier.DISK))
                saves.append(describe(idx, link))
    return MemoryOps(tuple(copies), tuple(saves))
