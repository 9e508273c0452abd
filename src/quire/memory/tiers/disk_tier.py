"""The disk tier: blocks that are loaded from disk into host memory, and saved when the host evicts them.

The memory manager does no disk I/O. The caller knows which blocks are stored; `find_loads` returns the stored blocks
that a hit lacks. The caller reads and verifies them and passes each with a ticket to `publish_loaded`, which publishes
it in a host block; then it can be hit like any other.

```
 device, host   [ 0 ][ 1 ]          [ 4 ]
 disk                     [ 2 ][ 3 ][ 4 ][ 5 ]      a hit of 6 blocks must load 2, 3 and 5
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from quire.errors import InvariantViolation
from quire.memory.groups.cache_group import longest_agreed
from quire.memory.pool.arena import Arena
from quire.memory.pool.pool import NULL_BLOCK, BlockPool
from quire.memory.prefix.published import PublishedBlocks
from quire.memory.prefix.radix_node import NodePosition
from quire.memory.prefix.token_chain import TokenChain
from quire.memory.results import BlockCopy, FetchedBlock, MemoryOps, StoredBlock, Tier
from quire.memory.sequence_blocks import SequenceBlocks
from quire.memory.tables.tables import BlockTables


class DiskLoad(NamedTuple):
    """A block of a chain that is on disk, and not on the device or the host.

    Args:
        block_idx: index of the block in the chain.
        block: identity of the block on disk.
    """

    block_idx: int
    block: StoredBlock


class LoadPlan(NamedTuple):
    """The blocks that must be loaded for a hit.

    Args:
        num_blocks: length of the hit in blocks.
        loads: blocks to load, in the order of the chain.
    """

    num_blocks: int
    loads: list[DiskLoad]


class SaveObserver(Protocol):
    """Receives the blocks that are saved to disk, and changes nothing."""

    def on_save(self, group_idx: int, where: NodePosition) -> None:
        """Record that a published block is about to be saved."""


class DiskTier:
    """Commands and queries of the disk tier.

    Args:
        tables: block tables with a host tier.

    Attributes:
        num_loads: number of loaded blocks that were published.
        num_saves: number of blocks that were saved when the host evicted them; some were on disk already.
        ended: chains of the sequences that were freed, with their numbers of computed tokens; None unless a caller
            collects them.
        observer: receives the blocks that are saved, if set.
    """

    __slots__ = ("_saves", "_tables", "ended", "num_loads", "num_saves", "observer")

    def __init__(self, tables: BlockTables) -> None:
        if tables.host is None:
            raise ValueError("a disk tier needs a host tier: set host_bytes")
        self._tables = tables
        self._saves: list[StoredBlock] = []
        self.ended: list[tuple[TokenChain, int]] | None = None
        self.num_loads = 0
        self.num_saves = 0
        self.observer: SaveObserver | None = None
        for idx, group in enumerate(tables.host.groups):
            group.pool.keeper = DiskSink(self, idx, group.pool)

    # ---- queries ----

    def find_loads(
        self, chain: TokenChain, holds: Callable[[StoredBlock], bool], max_tokens: int | None = None
    ) -> LoadPlan:
        """Return the blocks to load from disk for the longest hit on blocks of all three tiers.

        The hit is shorter if the host has no room for its blocks.

        Args:
            chain: chain of the prompt's tokens; the hit leaves at least one of them to compute.
            holds: function that returns whether a block is on disk.
            max_tokens: maximum length of the hit in tokens; None for no limit.
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
            for _, group_idx in self._idle_blocks_needed(chain, length):
                needs[group_idx] += 1
            if self._host_arena.fits(needs):
                return LoadPlan(
                    length, sorted((load for group in loads for load in group), key=lambda load: load.block_idx)
                )
            limit = length * 3 // 4

    def find_missing(self, chain: TokenChain, max_tokens: int | None = None) -> list[DiskLoad]:
        """Return a chain's whole blocks, of all groups, that are neither on the device nor on the host.

        Args:
            chain, max_tokens: see `find_loads`.
        """
        size = self._tables.groups[0].spec.block_size
        limit = min(len(chain.tokens) - 1, len(chain.tokens) if max_tokens is None else max_tokens) // size
        views = [CombinedView(indexes, idx, chain, _holds_nothing) for idx, indexes in enumerate(self._indexes())]
        return [load for view in views for load in view.loads(0, limit)]

    def stored_block(self, chain: TokenChain, group_idx: int, block_idx: int) -> StoredBlock:
        """Return the identity on disk of a chain's full block."""
        return _describe(chain, group_idx, block_idx)

    def exporting_ops(self, chain: TokenChain, num_blocks: int, wants: Callable[[StoredBlock], bool]) -> MemoryOps:
        """Return device-to-disk copies of a chain's published blocks, to perform between a step and the next plan.

        Blocks that a pending copy will write are left out: their contents are not there yet.

        Args:
            chain: a chain of tokens that were computed.
            num_blocks: number of its blocks, all of them full.
            wants: function that returns whether to copy a block.
        """
        copies: list[BlockCopy] = []
        saves: list[StoredBlock] = []
        written = {(c.group_idx, c.dst_id) for c in self._tables.pending_copies if c.dst_tier is Tier.DEVICE}
        for idx, group in enumerate(self._tables.groups):
            for block_idx, block_id in enumerate(group.pool.index.published(chain, 0, num_blocks)):
                if block_id == NULL_BLOCK or (idx, block_id) in written:
                    continue
                block = _describe(chain, idx, block_idx)
                if wants(block):
                    copies.append(BlockCopy(idx, block_id, len(saves), Tier.DEVICE, Tier.DISK))
                    saves.append(block)
        return MemoryOps(tuple(copies), tuple(saves))

    def saving_ops(self) -> MemoryOps:
        """Return copies of all whole published blocks to disk, in the order of eviction."""
        copies: list[BlockCopy] = []
        saves: list[StoredBlock] = []
        for tier in (Tier.HOST, Tier.DEVICE):
            for idx, group in enumerate(self._tables.groups_on(tier)):
                pool = group.pool
                used_ids = [block_id for block_id in pool.index.block_ids() if pool.ref_counts[block_id]]
                for block_id in pool.idle.victims(len(pool.idle)) + used_ids:
                    position = pool.index.position_of(block_id)
                    if position is not None and not position[0].is_tail:
                        copies.append(BlockCopy(idx, block_id, len(saves), tier, Tier.DISK))
                        saves.append(describe(idx, position))
        return MemoryOps(tuple(copies), tuple(saves))

    # ---- commands ----

    def publish_loaded(self, chain: TokenChain, num_blocks: int, fetched: Sequence[FetchedBlock]) -> list[int]:
        """Publish blocks that were read from disk in host blocks, until the host has no more room.

        This evicts no host blocks that the hit of `num_blocks` blocks needs.

        Args:
            chain: chain of the blocks.
            num_blocks: see `LoadPlan`.
            fetched: blocks that `find_loads` returned.

        Returns:
            The tickets that pending copies use; the caller can drop the other tickets.
        """
        tables, groups = self._tables, self._tables.groups_on(Tier.HOST)
        tables.version += 1
        # The hit's idle blocks and the loaded blocks are held until all are published, so that none evicts another.
        retained = self._idle_blocks_needed(chain, num_blocks)
        for block_idx, group_idx in retained:
            groups[group_idx].pool.retain(_published(groups[group_idx].pool, chain, block_idx))
        published_tickets = []
        for group_idx, block_idx, ticket in fetched:
            pool = groups[group_idx].pool
            if pool.index.holds(chain, block_idx):
                continue
            if not self._host_arena.fits([int(idx == group_idx) for idx in range(len(groups))]):
                break
            (block_id,) = tables.take(group_idx, 1, Tier.HOST)
            # Inserted after the allocation, whose evictions may remove nodes of the tree.
            if pool.index.tree.insert(chain, block_idx + 1, block_idx) <= block_idx:
                pool.release((block_id,))
                break
            tables.pending_copies.append(BlockCopy(group_idx, ticket, block_id, Tier.DISK, Tier.HOST))
            pool.index.put(pool.index.tree.match(chain, block_idx + 1).position(block_idx), block_id)
            retained.append((block_idx, group_idx))
            published_tickets.append(ticket)
        # Blocks are looked up again, since allocations may have moved them. The tail is evicted before the head.
        for block_idx, group_idx in sorted(retained, reverse=True):
            groups[group_idx].pool.release(_published(groups[group_idx].pool, chain, block_idx))
        self.num_loads += len(published_tickets)
        if tables.observer is not None:
            tables.observer.loads_published(chain, num_blocks, fetched)
        return published_tickets

    def note_end(self, state: SequenceBlocks) -> None:
        """Record the chain of a sequence that is freed, if a caller collects them."""
        if self.ended is not None and state.is_publishing:
            self.ended.append((state.chain, state.num_computed))

    def take_saves(self) -> tuple[StoredBlock, ...]:
        """Return and clear the identities of the blocks that the pending copies save; see `MemoryOps.saves`."""
        saves, self._saves = tuple(self._saves), []
        return saves

    def forget_saves(self) -> None:
        """Cancel all saves that `take_saves` has not returned yet."""
        pending = self._tables.pending_copies
        pending[:] = [copy for copy in pending if copy.dst_tier is not Tier.DISK]
        self._saves = []

    # ---- called by the pools ----

    def save(self, group_idx: int, block_id: int, position: NodePosition | None) -> None:
        """Queue a copy of a host block to disk, before the block is overwritten."""
        self._tables.arena.moves.append(BlockCopy(group_idx, block_id, len(self._saves), Tier.HOST, Tier.DISK))
        self._saves.append(describe(group_idx, position))
        self.num_saves += 1
        if self.observer is not None and position is not None:
            self.observer.on_save(group_idx, position)

    # ---- parts ----

    def _indexes(self) -> list[tuple[PublishedBlocks, PublishedBlocks]]:
        """Return the indexes of each group, on the device and on the host."""
        tiers = zip(self._tables.groups, self._tables.groups_on(Tier.HOST), strict=True)
        return [(device.pool.index, host.pool.index) for device, host in tiers]

    def _idle_blocks_needed(self, chain: TokenChain, num_blocks: int) -> list[tuple[int, int]]:
        """Return (block index, group) of the idle host blocks that a hit of `num_blocks` blocks needs."""
        needed = []
        for idx, (device, host) in enumerate(self._indexes()):
            group = self._tables.groups_on(Tier.HOST)[idx]
            for block_idx in range(group.num_skipped(num_blocks * group.spec.block_size), num_blocks):
                (block_id,) = host.published(chain, block_idx, block_idx + 1)
                is_needed = block_id != NULL_BLOCK and not device.holds(chain, block_idx)
                if is_needed and not group.pool.ref_counts[block_id]:
                    needed.append((block_idx, idx))
        return needed

    @property
    def _host_arena(self) -> Arena:
        assert self._tables.host is not None
        return self._tables.host.arena


class DiskSink:
    """Saves the published blocks that one group's host pool evicts."""

    __slots__ = ("_disk_tier", "_group_idx", "_pool")

    def __init__(self, disk_tier: DiskTier, group_idx: int, pool: BlockPool) -> None:
        self._disk_tier = disk_tier
        self._group_idx = group_idx
        self._pool = pool

    def keep(self, block_ids: Sequence[int]) -> None:
        """Save published blocks that are about to be evicted."""
        for block_id in block_ids:
            self._disk_tier.save(self._group_idx, block_id, self._pool.index.position_of(block_id))


class CombinedView:
    """A chain's blocks of one group that are published on a tier or stored on disk; a `PublishedRun`."""

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
        """Return the number of leading blocks, at most `limit`, that are all available."""
        return next((idx for idx in range(limit) if not self._is_available(idx)), limit)

    def last_gap(self, start: int, end: int) -> int:
        """Return the index of the last block in `[start, end)` that is not available, or -1."""
        return next((idx for idx in range(end - 1, start - 1, -1) if not self._is_available(idx)), -1)

    def loads(self, start: int, end: int) -> list[DiskLoad]:
        """Return the blocks in `[start, end)` that are on disk only."""
        missing = [block_idx for block_idx in range(start, end) if not self._is_on_a_tier(block_idx)]
        return [DiskLoad(block_idx, self._describe(block_idx)) for block_idx in missing]

    def _is_available(self, block_idx: int) -> bool:
        if block_idx not in self._known:
            self._known[block_idx] = self._is_on_a_tier(block_idx) or self._holds(self._describe(block_idx))
        return self._known[block_idx]

    def _is_on_a_tier(self, block_idx: int) -> bool:
        return any(index.holds(self._chain, block_idx) for index in self._indexes)

    def _describe(self, block_idx: int) -> StoredBlock:
        return _describe(self._chain, self._group_idx, block_idx)


def _describe(chain: TokenChain, group_idx: int, block_idx: int) -> StoredBlock:
    """Return the identity on disk of a chain's full block."""
    digest = chain.digests(block_idx + 1)[block_idx]
    return StoredBlock(group_idx, digest, chain.content(block_idx), chain.digest_before(block_idx))


def _holds_nothing(_: StoredBlock) -> bool:
    return False


def describe(group_idx: int, node_position: NodePosition | None) -> StoredBlock:
    """Return the identity of a published block on disk."""
    assert node_position is not None, "only published blocks are saved"
    node, position = node_position
    digest, parent = node.digest(position), node.digest_before(position)
    return StoredBlock(group_idx, digest, node.content(position), parent)


def _published(pool: BlockPool, chain: TokenChain, block_idx: int) -> list[int]:
    """Return the published block of a chain at an index, which must have a holder."""
    block_ids = pool.index.published(chain, block_idx, block_idx + 1)
    if block_ids == [NULL_BLOCK]:
        raise InvariantViolation("M4", f"block {block_idx} of a chain has a holder but is not published")
    return block_ids
