"""The blocks of one cache group on the device: who holds them, which are published, which can be had."""

from __future__ import annotations

from collections.abc import Iterable

from quire.memory.eviction import EvictionPolicy
from quire.memory.prefix_index import PrefixIndex

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1 to `num_blocks`; block 0 is the null block, never handed out.

    A block is *used* (it has holders), *idle* (none, but published) or *free*.

    Args:
        num_blocks: usable blocks.
        idle: the eviction policy, which holds the idle blocks.

    Invariants: M1, M2 (with the tables of the manager), M10.
    """

    __slots__ = ("_free", "idle", "index", "num_blocks", "num_evictions", "ref_counts")

    def __init__(self, num_blocks: int, idle: EvictionPolicy) -> None:
        self.num_blocks = num_blocks
        self.idle = idle
        self.index = PrefixIndex()
        self.ref_counts = [0] * (num_blocks + 1)
        self.num_evictions = 0
        # A stack with the lowest id on top: a fresh pool hands out ascending, contiguous runs.
        self._free = list(range(num_blocks, 0, -1))

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks that `take` could hand out: free and idle ones."""
        return len(self._free) + len(self.idle)

    @property
    def free_ids(self) -> tuple[int, ...]:
        """The free blocks, the next one to be handed out last."""
        return tuple(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out blocks with one holder each: free ones first, then evicted ones.

        Args:
            count: at most `num_available`.
        """
        free = self._free
        ref_counts = self.ref_counts
        from_free = min(count, len(free))
        taken: list[int] = []
        if from_free:
            taken = free[-from_free:]
            taken.reverse()
            del free[-from_free:]
        for _ in range(count - from_free):
            victim = self.idle.evict()
            self.index.remove(victim)
            self.num_evictions += 1
            taken.append(victim)
        for block_id in taken:
            ref_counts[block_id] = 1
        return taken

    def retain(self, block_ids: Iterable[int]) -> None:
        """Add one holder to each block; an idle block becomes used."""
        ref_counts = self.ref_counts
        for block_id in block_ids:
            if ref_counts[block_id] == 0:
                self.idle.discard(block_id)
            ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Remove one holder from each block; without holders a block becomes idle if published, else free."""
        ref_counts = self.ref_counts
        for block_id in block_ids:
            ref_counts[block_id] -= 1
            if ref_counts[block_id] == 0:
                if block_id in self.index:
                    self.idle.add(block_id)
                else:
                    self._free.append(block_id)
