"""The used, idle and free blocks of one cache group in one tier.

For models with one cache group, this file, `idle_blocks` and `idle_queue` are the whole pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress

from quire.errors import InvariantViolation
from quire.memory.pool.idle_blocks import IdleBlocks, Part, RetentionPriority
from quire.memory.pool.idle_queue import Ticker
from quire.memory.pool.protocols import BlockObserver, BlockSource, EvictionSink
from quire.memory.pool.recent_changes import RecentChanges
from quire.memory.prefix.published import PublishedBlocks
from quire.memory.prefix.radix_node import NULL_BLOCK

__all__ = ["NULL_BLOCK", "BlockPool"]


class BlockPool:
    """The blocks of one group; block 0 is the null block, never handed out.

    A block is *used* (reference count above 0), *idle* (reference count 0, but published: an eviction candidate) or
    *free*. A pool that shares an arena with others gets further blocks from its `source` when it needs them.

    Args:
        index: published blocks; it has as many ids as the group's view of the memory, the null block included.
        idle: idle blocks of the group, empty.
        free: initial free blocks.
        clock: clock of the ticks at which blocks become idle; the clock of `idle`.

    Attributes:
        index, idle: the arguments of these names.
        ref_counts: reference count of each block, its number of holders.
        free: free blocks, a stack.
        source: slabs of the group, if the pool shares an arena.
        keeper: sink of evicted blocks, if there is a lower tier.
        observer: receives block events, if set.
        recent: recorder of copied, merged and evicted blocks, if set.

    Invariants: M1, M2 (with the tables of the manager), M10.
    """

    __slots__ = (
        "_clock",
        "free",
        "idle",
        "index",
        "keeper",
        "num_evictions",
        "num_used",
        "observer",
        "recent",
        "ref_counts",
        "source",
    )

    def __init__(self, index: PublishedBlocks, idle: IdleBlocks, free: Iterable[int], clock: Ticker) -> None:
        self._clock = clock
        self.idle = idle
        self.index = index
        self.ref_counts = [0] * index.num_ids
        self.num_evictions = 0
        self.num_used = 0
        # A stack: the last entry is handed out next.
        self.free = list(free)
        self.source: BlockSource | None = None
        self.keeper: EvictionSink | None = None
        self.observer: BlockObserver | None = None
        self.recent: RecentChanges | None = None

    def take(self, count: int) -> list[int]:
        """Hand out blocks with one holder each: free ones first, then evicted ones.

        Args:
            count: number of blocks, at most the number of free and idle ones.

        Raises:
            InvariantViolation: M1, fewer blocks are free or idle.
        """
        if self.source is not None and count > len(self.free):
            self.source.reserve(count)
        free = self.free
        ref_counts = self.ref_counts
        taken: list[int] = []
        from_free = min(count, len(free))
        if from_free:
            taken = free[-from_free:]
            taken.reverse()
            del free[-from_free:]
            if self.source is not None:
                self.source.on_allocate(taken)
        while len(taken) < count:
            victims = self.idle.victims(count - len(taken))
            if not victims:
                raise InvariantViolation("M1", f"{count} blocks are taken, but only {len(taken)} are available")
            self.evict(victims)
            taken += victims
        for block_id in taken:
            ref_counts[block_id] = 1
        self.num_used += count
        if self.observer is not None and not self.observer.sample.isdisjoint(taken):
            self.observer.on_allocate(taken)
        return taken

    def retain(self, block_ids: Sequence[int]) -> None:
        """Increment the reference count of each block, all different, none of them free; idle blocks become used."""
        ref_counts = self.ref_counts
        counts = [ref_counts[block_id] for block_id in block_ids]
        num_woken = counts.count(0)
        if num_woken == len(counts):
            woken = block_ids
            for block_id in block_ids:
                ref_counts[block_id] = 1
        else:
            woken = [block_id for block_id, count in zip(block_ids, counts, strict=True) if not count]
            for block_id in block_ids:
                ref_counts[block_id] += 1
        if woken:
            parts = self.idle.discard(woken)
            self.num_used += len(woken)
            if self.source is not None:
                self.source.on_reuse(parts)
            if self.observer is not None:
                self.observer.on_reuse(woken)

    def release(
        self,
        block_ids: Iterable[int],
        priority: RetentionPriority = RetentionPriority.DEFAULT,
        moments: Sequence[int] | None = None,
    ) -> None:
        """Decrement the reference count of each block, all different; at 0 it becomes idle if published, else free.

        Args:
            block_ids: the blocks.
            priority: retention priority of the blocks that become idle, unless they are retained.
            moments: rising ticks at which the blocks become idle; default: the clock's next ticks.

        Raises:
            InvariantViolation: M2, a block has no holder or is listed twice; nothing has changed then.
        """
        ref_counts = self.ref_counts
        released = list(block_ids)
        is_all_published = len(self.index) == self.num_used + len(self.idle)
        counts = [ref_counts[block_id] for block_id in released]
        num_last = counts.count(1)
        if (num_last < len(counts) and 0 in counts) or len({*released}) < len(released):
            wrong = sorted({idx for idx in released if not ref_counts[idx] or released.count(idx) > 1})
            raise InvariantViolation("M2", f"released blocks {wrong} have no holder or are listed twice")
        if num_last == len(counts):
            for block_id in released:
                ref_counts[block_id] = 0
        else:
            for block_id in released:
                ref_counts[block_id] -= 1
            if moments is not None:
                moments = list(compress(moments, [count == 1 for count in counts]))
            released = [block_id for block_id in released if not ref_counts[block_id]]
        self.num_used -= len(released)
        rested, freed = (released, []) if is_all_published else self.index.split(released)
        parts: list[Part] = []
        if rested:
            if moments is None:
                moments = self._clock.ticks(len(rested))
            elif freed:
                moments = [moment for moment, idx in zip(moments, released, strict=True) if idx in self.index]
            parts = self.idle.add(rested, priority, moments)
        self.free += freed
        if self.source is not None:
            if rested:
                self.source.on_idle(parts)
            if freed:
                self.source.on_free(freed)
        if self.observer is not None and rested:
            self.observer.on_idle(rested)

    def set_priority(self, block_id: int, priority: RetentionPriority) -> None:
        """Change the retention priority of a block if it is idle, as if it had just become idle."""
        if block_id in self.idle:
            old = self.idle.remove((block_id,))
            new = self.idle.add((block_id,), priority, self._clock.ticks(1))
            if self.source is not None:
                self.source.on_reprioritise(old, new)

    def evict(self, block_ids: Sequence[int]) -> list[Part]:
        """Unpublish idle blocks; return them by retention priority. The caller reuses or frees them."""
        if self.observer is not None:
            self.observer.on_evict(block_ids)
        if self.recent is not None:
            self.recent.evicted.extend(block_ids)
        self.num_evictions += len(block_ids)
        if self.keeper is not None:
            self.keeper.keep(block_ids)
        parts = self.idle.remove(block_ids)
        self.index.remove(block_ids)
        return parts

    def withdraw(self, block_id: int) -> None:
        """Unpublish a used block, which is about to be written in place."""
        self.index.remove((block_id,))
        self.idle.forget((block_id,))

    def reset(self) -> None:
        """Unpublish all blocks: idle blocks are free at once, used ones when they are released."""
        self.index.clear()
        self._empty(list(self.idle))

    def discard(self, block_ids: Sequence[int]) -> None:
        """Free idle blocks whose contents do not match their published tokens."""
        self.index.remove(block_ids)
        self._empty(block_ids)

    def _empty(self, block_ids: Sequence[int]) -> None:
        """Free idle blocks that are no longer published."""
        parts = self.idle.remove(block_ids)
        self.free += block_ids
        if self.source is not None and parts:
            self.source.on_empty(parts)

    def move(self, src_id: int, dst_id: int) -> None:
        """Replace a used block by a free one, which takes over its reference count and its position in the index."""
        self.free.remove(dst_id)
        self.ref_counts[dst_id] = self.ref_counts[src_id]
        self.ref_counts[src_id] = 0
        self.index.move(src_id, dst_id)
        self.idle.forget((src_id,))
        self.free.append(src_id)
        if self.observer is not None:
            self.observer.on_move(src_id, dst_id)
