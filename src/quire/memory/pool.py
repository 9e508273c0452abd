"""The blocks of one cache group on the device: who holds them, which are published, which can be had."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from quire.memory.eviction import EvictionPolicy
from quire.memory.prefix_index import PrefixIndex

NULL_BLOCK = 0


class Lender(Protocol):
    """Where a pool that shares its bytes with others gets its blocks from; it hears of every change."""

    def lend(self, count: int) -> None:
        """See that `count` blocks of the pool are free."""
        ...

    def took(self, block_ids: Sequence[int]) -> None:
        """Note that free blocks have holders now."""
        ...

    def woke(self, block_ids: Sequence[int]) -> None:
        """Note that idle blocks have holders now."""
        ...

    def rested(self, block_ids: Sequence[int]) -> None:
        """Note that blocks have no holders any more, but are published."""
        ...

    def freed(self, block_ids: Sequence[int]) -> None:
        """Note that blocks have no holders any more and hold nothing."""
        ...


class BlockPool:
    """The blocks of one group; block 0 is the null block, never handed out.

    A block is *used* (it has holders), *idle* (none, but published) or *free*. A pool that shares its bytes with
    others has further blocks that are lent to it when it needs them.

    Args:
        num_ids: blocks of the group's view of the memory, the null block included.
        idle: the eviction policy, which holds the idle blocks.
        free: blocks to start with.

    Attributes:
        lender: set when the pool shares its bytes.

    Invariants: M1, M2 (with the tables of the manager), M10.
    """

    __slots__ = ("free", "idle", "index", "lender", "num_evictions", "num_used", "ref_counts")

    def __init__(self, num_ids: int, idle: EvictionPolicy, free: Iterable[int] = ()) -> None:
        self.idle = idle
        self.index = PrefixIndex()
        self.ref_counts = [0] * num_ids
        self.num_evictions = 0
        self.num_used = 0
        # A stack, the next block to be handed out last.
        self.free = list(free)
        self.lender: Lender | None = None

    def take(self, count: int) -> list[int]:
        """Hand out blocks with one holder each: free ones first, then evicted ones.

        Args:
            count: at most what there is.
        """
        if self.lender is not None and count > len(self.free):
            self.lender.lend(count)
        free = self.free
        ref_counts = self.ref_counts
        taken: list[int] = []
        from_free = min(count, len(free))
        if from_free:
            taken = free[-from_free:]
            taken.reverse()
            del free[-from_free:]
            if self.lender is not None:
                self.lender.took(taken)
        if from_free < count:
            victims = [self.idle.evict() for _ in range(count - from_free)]
            for victim in victims:
                self.index.remove(victim)
            self.num_evictions += len(victims)
            taken += victims
        for block_id in taken:
            ref_counts[block_id] = 1
        self.num_used += count
        return taken

    def retain(self, block_ids: Iterable[int]) -> None:
        """Add one holder to each block; an idle block becomes used."""
        ref_counts = self.ref_counts
        woken = []
        for block_id in block_ids:
            if ref_counts[block_id] == 0:
                self.idle.discard(block_id)
                woken.append(block_id)
            ref_counts[block_id] += 1
        if woken:
            self.num_used += len(woken)
            if self.lender is not None:
                self.lender.woke(woken)

    def release(self, block_ids: Iterable[int]) -> None:
        """Remove one holder from each block; without holders a block becomes idle if published, else free."""
        ref_counts, index = self.ref_counts, self.index
        rested: list[int] = []
        freed: list[int] = []
        for block_id in block_ids:
            ref_counts[block_id] -= 1
            if ref_counts[block_id] == 0:
                (rested if block_id in index else freed).append(block_id)
        self.num_used -= len(rested) + len(freed)
        for block_id in rested:
            self.idle.add(block_id)
        self.free += freed
        if self.lender is not None:
            self.lender.rested(rested)
            self.lender.freed(freed)

    def evict(self, block_id: int) -> None:
        """Make one idle block free, out of turn."""
        self.idle.discard(block_id)
        self.index.remove(block_id)
        self.num_evictions += 1
        self.free.append(block_id)

    def move(self, src_id: int, dst_id: int) -> None:
        """Let a free block take the place of a used one: holders and identity."""
        self.free.remove(dst_id)
        self.ref_counts[dst_id] = self.ref_counts[src_id]
        self.ref_counts[src_id] = 0
        self.index.move(src_id, dst_id)
        self.free.append(src_id)
