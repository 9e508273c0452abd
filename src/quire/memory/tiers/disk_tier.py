"""The disk below the tiers: what is loaded from it into host memory, and what is saved when the host evicts it.

Memory asks no disk. Somebody else knows what is stored there; memory says what of it a hit lacks (`find_loads`). Who
then reads it and finds it whole gives it back with a ticket (`publish_loaded`): it gets a host block and is published
there, and a hit finds it as it finds all else on the host.

```
 device, host   [ 0 ][ 1 ]          [ 4 ]
 disk                     [ 2 ][ 3 ][ 4 ][ 5 ]      for a hit of 6 blocks, 2, 3 and 5 are to be loaded
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.errors import InvariantViolation
from quire.memory.groups.cache_group import longest_agreed
from quire.memory.pool.arena import Arena
from quire.memory.pool.pool import NULL_BLOCK, BlockPool
from quire.memory.prefix.published import PublishedBlocks
from quire.memory.prefix.radix_node import NodePosition
from quire.memory.prefix.token_chain import TokenChain
from quire.memory.results import BlockCopy, FetchedBlock, MemoryOps, StoredBlock, Tier
from quire.memory.tables.tables import BlockTables


class DiskLoad(NamedTuple):
    """A block of a chain that is on disk and on no tier above.

    Args:
        block_idx: its place in the chain.
        block: what it is.
    """

    block_idx: int
    block: StoredBlock


class LoadPlan(NamedTuple):
    """What must be loaded for a hit.

    Args:
        num_blocks: of the hit.
        loads: in the order of the chain.
    """

    num_blocks: int
    loads: list[DiskLoad]


class DiskTier:
    """The verbs of the disk.

    Args:
        tables: with a host tier.

    Attributes:
        num_loads: blocks that were adopted.
        num_saves: blocks that were saved when the host evicted them, some of which were on disk already.
    """

    __slots__ = ("_saves", "_tables", "num_loads", "num_saves")

    def __init__(self, tables: BlockTables) -> None:
        if tables.host is None:
            raise ValueError("blocks go to disk and come back through a host tier: give host_bytes")
        self._tables = tables
        self._saves: list[StoredBlock] = []
        self.num_loads = 0
        self.num_saves = 0
        for idx, group in enumerate(tables.host.groups):
            group.pool.keeper = DiskSink(self, idx, group.pool)

    # ---- questions ----

    def find_loads(
        self, chain: TokenChain, holds: Callable[[StoredBlock], bool], max_tokens: int | None = None
    ) -> LoadPlan:
        """Say what must be loaded for the longest hit that all tiers and the disk can serve together.

        Where the host has no room for so much, it is a shorter hit.

        Args:
            chain: of the tokens, at least one of which is left to compute.
            holds: says whether a block is on disk.
            max_tokens: of the hit, None for all.
        """
        groups = self._tables.groups
        size = groups[0].spec.block_size
        limit = min(len(chain.tokens) - 1, len(chain.tokens) if max_tokens is None else max_tokens) // size
        views = [CombinedView(indexes, idx, chain, holds) for idx, indexes in enumerate(self._indexes())]
        while True:
            length, _ = longest_agreed(groups, views, range(len(groups)), limit)
            loads = [
                view.loads(group.num_skipped(length * size), length) for group, view in zip(groups, views, strict=True)
            ]
            needs = [len(group) for group in loads]
            for _, group_idx in self._resting(chain, length):
                needs[group_idx] += 1
            if self._host_arena.fits(needs):
                return LoadPlan(
                    length, sorted((load for group in loads for load in group), key=lambda load: load.block_idx)
                )
            limit = length * 3 // 4

    def saving_ops(self) -> MemoryOps:
        """Return movements that bring all whole published blocks to disk, what is evicted last being last."""
        copies: list[BlockCopy] = []
        saves: list[StoredBlock] = []
        for tier in (Tier.HOST, Tier.DEVICE):
            for idx, group in enumerate(self._tables.groups_on(tier)):
                pool = group.pool
                held = [block_id for block_id in pool.index.block_ids() if pool.ref_counts[block_id]]
                for block_id in pool.idle.victims(len(pool.idle)) + held:
                    place = pool.index.position_of(block_id)
                    if place is not None and not place[0].is_tail:
                        copies.append(BlockCopy(idx, block_id, len(saves), tier, Tier.DISK))
                        saves.append(describe(idx, place))
        return MemoryOps(tuple(copies), tuple(saves))

    # ---- commands ----

    def publish_loaded(self, chain: TokenChain, num_blocks: int, fetched: Sequence[FetchedBlock]) -> list[int]:
        """Publish blocks on the host that were read from disk, as many of the first as there is room for.

        What else a hit of `num_blocks` blocks needs of the host makes no room for them.

        Args:
            chain: what the blocks are of.
            num_blocks: see `LoadPlan`.
            fetched: blocks that `find_loads` named.

        Returns:
            The tickets that movements will name; the others are not needed.
        """
        tables, groups = self._tables, self._tables.groups_on(Tier.HOST)
        tables.version += 1
        # Each has a holder until all are there, so that none makes room for another.
        held = self._resting(chain, num_blocks)
        for block_idx, group_idx in held:
            groups[group_idx].pool.retain(_published(groups[group_idx].pool, chain, block_idx))
        adopted = []
        for group_idx, block_idx, ticket in fetched:
            pool = groups[group_idx].pool
            if pool.index.holds(chain, block_idx):
                continue
            if not self._host_arena.fits([int(idx == group_idx) for idx in range(len(groups))]):
                break
            (block_id,) = tables.take(group_idx, 1, Tier.HOST)
            # After that, since what is evicted for it may take places with it.
            if pool.index.tree.insert(chain, block_idx + 1, block_idx) <= block_idx:
                pool.release((block_id,))
                break
            tables.pending_copies.append(BlockCopy(group_idx, ticket, block_id, Tier.DISK, Tier.HOST))
            pool.index.put(pool.index.tree.match(chain, block_idx + 1).position(block_idx), block_id)
            held.append((block_idx, group_idx))
            adopted.append(ticket)
        # By place: to take one may have moved the others. The tail is evicted before the head.
        for block_idx, group_idx in sorted(held, reverse=True):
            groups[group_idx].pool.release(_published(groups[group_idx].pool, chain, block_idx))
        self.num_loads += len(adopted)
        if tables.observer is not None:
            tables.observer.loads_published(chain, num_blocks, fetched)
        return adopted

    def take_saves(self) -> tuple[StoredBlock, ...]:
        """Hand over what the blocks are that the movements so far bring to disk: see `MemoryOps.saves`."""
        saves, self._saves = tuple(self._saves), []
        return saves

    def forget_saves(self) -> None:
        """Save nothing of what was to be saved and is not handed over yet."""
        pending = self._tables.pending_copies
        pending[:] = [copy for copy in pending if copy.dst_tier is not Tier.DISK]
        self._saves = []

    # ---- what the pools ask for ----

    def save(self, group_idx: int, block_id: int, place: NodePosition | None) -> None:
        """Have a host block saved before anybody writes to it."""
        self._tables.arena.moves.append(BlockCopy(group_idx, block_id, len(self._saves), Tier.HOST, Tier.DISK))
        self._saves.append(describe(group_idx, place))
        self.num_saves += 1

    # ---- parts ----

    def _indexes(self) -> list[tuple[PublishedBlocks, PublishedBlocks]]:
        """Return the indexes of each group, on the device and on the host."""
        tiers = zip(self._tables.groups, self._tables.groups_on(Tier.HOST), strict=True)
        return [(device.pool.index, host.pool.index) for device, host in tiers]

    def _resting(self, chain: TokenChain, num_blocks: int) -> list[tuple[int, int]]:
        """Return what a hit of so many blocks would need of the host's idle blocks: place in the chain, and group."""
        idle_slabs = []
        for idx, (device, host) in enumerate(self._indexes()):
            group = self._tables.groups_on(Tier.HOST)[idx]
            for block_idx in range(group.num_skipped(num_blocks * group.spec.block_size), num_blocks):
                (block_id,) = host.published(chain, block_idx, block_idx + 1)
                is_needed = block_id != NULL_BLOCK and not device.holds(chain, block_idx)
                if is_needed and not group.pool.ref_counts[block_id]:
                    idle_slabs.append((block_idx, idx))
        return idle_slabs

    @property
    def _host_arena(self) -> Arena:
        assert self._tables.host is not None
        return self._tables.host.arena


class DiskSink:
    """Keeps what one group's host pool evicts.

    Args:
        archive: where to.
        group_idx: the group.
        pool: its blocks on the host.
    """

    __slots__ = ("_archive", "_group_idx", "_pool")

    def __init__(self, archive: DiskTier, group_idx: int, pool: BlockPool) -> None:
        self._archive = archive
        self._group_idx = group_idx
        self._pool = pool

    def keep(self, block_ids: Sequence[int]) -> None:
        """Have published blocks that are about to be evicted saved."""
        for block_id in block_ids:
            self._archive.save(self._group_idx, block_id, self._pool.index.position_of(block_id))


class CombinedView:
    """What of one chain's group is published on some tier, or stored: see `quire.memory.specs.PublishedRun`."""

    __slots__ = ("_chain", "_group_idx", "_holds", "_indexes", "_known")

    def __init__(
        self,
        indexes: Sequence[PublishedBlocks],
        group_idx: int,
        chain: TokenChain,
        holds: Callable[[StoredBlock], bool],
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

    def loads(self, start: int, end: int) -> list[DiskLoad]:
        """Return those of the blocks `[start, end)` that are on disk only."""
        places = [block_idx for block_idx in range(start, end) if not self._is_on_a_tier(block_idx)]
        return [DiskLoad(block_idx, self._describe(block_idx)) for block_idx in places]

    def _is_there(self, block_idx: int) -> bool:
        if block_idx not in self._known:
            self._known[block_idx] = self._is_on_a_tier(block_idx) or self._holds(self._describe(block_idx))
        return self._known[block_idx]

    def _is_on_a_tier(self, block_idx: int) -> bool:
        return any(index.holds(self._chain, block_idx) for index in self._indexes)

    def _describe(self, block_idx: int) -> StoredBlock:
        chain = self._chain
        digest = chain.digests(block_idx + 1)[block_idx]
        return StoredBlock(self._group_idx, digest, chain.content(block_idx), chain.digest_before(block_idx))


def describe(group_idx: int, place: NodePosition | None) -> StoredBlock:
    """Return what a published block is, for the disk."""
    assert place is not None, "only published blocks are saved"
    node, position = place
    digest, parent = node.digest(position), node.digest_before(position)
    return StoredBlock(group_idx, digest, node.content(position), parent)


def _published(pool: BlockPool, chain: TokenChain, block_idx: int) -> list[int]:
    """Return the block of a chain that is published."""
    found = pool.index.published(chain, block_idx, block_idx + 1)
    if found == [NULL_BLOCK]:
        raise InvariantViolation("M4", f"block {block_idx} of a chain has a holder, and is published no more")
    return found
