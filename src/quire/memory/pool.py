"""The blocks of one cache group in one tier: who holds them, which are published, which can be had."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from quire.errors import InvariantViolation
from quire.memory.eviction import EvictionPolicy, PolicyMaker
from quire.memory.prefix_index import NULL_BLOCK, PrefixIndex
from quire.memory.prefix_tree import PrefixTree
from quire.memory.residency import BlockWatcher
from quire.memory.rest_queue import Clock, RestQueue

__all__ = ["NULL_BLOCK", "BlockPool", "BlockWatcher", "Keeper", "Lender", "Retired"]


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

    def rested_anew(self, block_id: int) -> None:
        """Note that an idle block counts as if it had just become idle."""
        ...

    def freed(self, block_ids: Sequence[int]) -> None:
        """Note that blocks have no holders any more and hold nothing."""
        ...


class Keeper(Protocol):
    """Where published blocks may live on when they are evicted."""

    def keep(self, block_ids: Sequence[int]) -> None:
        """Note that published blocks are about to be evicted, in this order."""
        ...


class Retired(NamedTuple):
    """Blocks that were idle when the prefix cache was reset: free in all but name, until they are wanted.

    Args:
        idle: the blocks.
        tree: where they were published.
    """

    idle: EvictionPolicy
    tree: PrefixTree


class BlockPool:
    """The blocks of one group; block 0 is the null block, never handed out.

    A block is *used* (it has holders), *idle* (none, but published) or *free*. A pool that shares its bytes with
    others has further blocks that are lent to it when it needs them.

    Args:
        index: of the published blocks; has as many ids as the group's view of the memory, the null block's included.
        policy: makes an eviction policy, which holds the idle blocks.
        free: blocks to start with.
        clock: of the moments at which blocks come to rest.

    Attributes:
        idle: the policy.
        rest: blocks without holders that are published, or were at a reset, in the order in which they became so; kept
            by the policy or the lender, if one of them needs it.
        index: as given.
        retired: what was idle at each reset since, the oldest reset first.
        lender: set when the pool shares its bytes.
        keeper: set when there is a tier below; blocks from before a reset are not offered to it.
        watcher: told what becomes of the blocks, where somebody listens.

    Invariants: M1, M2 (with the tables of the manager), M10.
    """

    __slots__ = (
        "_policy",
        "free",
        "idle",
        "index",
        "keeper",
        "lender",
        "num_evictions",
        "num_used",
        "ref_counts",
        "rest",
        "retired",
        "watcher",
    )

    def __init__(
        self, index: PrefixIndex, policy: PolicyMaker, free: Iterable[int] = (), clock: Clock | None = None
    ) -> None:
        self._policy = policy
        self.rest = RestQueue(clock)
        self.idle = policy(self.rest)
        self.index = index
        self.retired: list[Retired] = []
        self.ref_counts = [0] * index.num_ids
        self.num_evictions = 0
        self.num_used = 0
        # A stack, the next block to be handed out last.
        self.free = list(free)
        self.lender: Lender | None = None
        self.keeper: Keeper | None = None
        self.watcher: BlockWatcher | None = None

    def take(self, count: int) -> list[int]:
        """Hand out blocks with one holder each: free ones first, then evicted ones.

        Args:
            count: at most the free and idle blocks.

        Raises:
            InvariantViolation: M1, there are fewer.
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
        while len(taken) < count:
            victims = self.next_victims(count - len(taken))
            if not victims:
                raise InvariantViolation("M1", f"{count} blocks are taken, and there are only {len(taken)}")
            self.evict(victims)
            taken += victims
        for block_id in taken:
            ref_counts[block_id] = 1
        self.num_used += count
        if self.watcher is not None:
            self.watcher.taken(taken)
        return taken

    def retain(self, block_ids: Sequence[int]) -> None:
        """Add one holder to each block, all different, none of them free; an idle block becomes used."""
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
            self.idle.discard(woken)
            self.num_used += len(woken)
            if self.lender is not None:
                self.lender.woke(woken)
            if self.watcher is not None:
                self.watcher.woke(woken)

    def release(self, block_ids: Iterable[int]) -> None:
        """Remove one holder from each block, all different; without one it becomes idle if published, else free.

        Raises:
            InvariantViolation: M2, a block has no holder, or is named twice; nothing has changed then.
        """
        ref_counts = self.ref_counts
        released = list(block_ids)
        is_all_published = len(self.index) == self.num_used + len(self.idle)
        counts = [ref_counts[block_id] for block_id in released]
        if 0 in counts or len({*released}) < len(released):
            wrong = sorted({idx for idx in released if not ref_counts[idx] or released.count(idx) > 1})
            raise InvariantViolation("M2", f"blocks {wrong} are released, but have no holder or are named twice")
        if counts.count(1) == len(counts):
            for block_id in released:
                ref_counts[block_id] = 0
        else:
            for block_id in released:
                ref_counts[block_id] -= 1
            released = [block_id for block_id in released if not ref_counts[block_id]]
        self.num_used -= len(released)
        rested, freed = (released, []) if is_all_published else self.index.split(released)
        if rested:
            self.idle.add(rested)
        self.free += freed
        if self.lender is not None:
            if rested:
                self.lender.rested(rested)
            if freed:
                self.lender.freed(freed)
        if self.watcher is not None and rested:
            self.watcher.rested(rested)

    def rest_anew(self, block_id: int) -> None:
        """Let a block that lost the hint, if it is idle, count as if it had just become so."""
        if not self.ref_counts[block_id]:
            self.idle.forget((block_id,))
            self.idle.add((block_id,))
            if self.lender is not None:
                self.lender.rested_anew(block_id)

    @property
    def num_retired(self) -> int:
        """Blocks that hold only what was published before a reset."""
        return sum(len(retired.idle) for retired in self.retired)

    def next_victim(self) -> int:
        """Return the block without holders that is to be evicted first; those from before a reset come first."""
        return self.next_victims(1)[0]

    def next_victims(self, most: int) -> list[int]:
        """Return the blocks without holders that are to be evicted next, in order; at most as many as there are."""
        # Each from before a reset may end what is left of it, so those go one by one.
        return self.retired[0].idle.victims(1) if self.retired else self.idle.victims(min(most, len(self.idle)))

    def evict(self, block_ids: Sequence[int]) -> None:
        """Take blocks without holders out of the index and the policy that know them."""
        if self.retired:
            block_ids = [block_id for block_id in block_ids if not self._is_retired(block_id)]
        if self.watcher is not None:
            self.watcher.evicted(block_ids)
        self.num_evictions += len(block_ids)
        if self.keeper is not None:
            self.keeper.keep(block_ids)
        self.idle.forget(block_ids)
        self.index.remove(block_ids)

    def _is_retired(self, block_id: int) -> bool:
        """Say whether a block without holders is from before a reset; if so, it is that no more."""
        if block_id in self.index:
            return False
        stem = self.index.forget(block_id)
        assert stem is not None, "what is idle was published"
        next(known for known in self.retired if known.tree is stem.tree).idle.forget((block_id,))
        self.retired = [known for known in self.retired if known.idle]
        return True

    def withdraw(self, block_id: int) -> None:
        """Take a used block that is about to be written out of the index."""
        self.index.remove((block_id,))
        self.idle.forget((block_id,))

    def reset(self, tree: PrefixTree) -> None:
        """Make nothing published be found again, in constant time: what is idle is evicted as it is wanted.

        Args:
            tree: where blocks will be published from now on.
        """
        if self.idle:
            self.retired.append(Retired(self.idle, self.index.tree))
        self.idle = self._policy(self.rest)
        self.index.reset(tree)

    def move(self, src_id: int, dst_id: int) -> None:
        """Let a free block take the place of a used one: holders and identity."""
        self.free.remove(dst_id)
        self.ref_counts[dst_id] = self.ref_counts[src_id]
        self.ref_counts[src_id] = 0
        self.index.move(src_id, dst_id)
        self.idle.forget((src_id,))
        self.free.append(src_id)
        if self.watcher is not None:
            self.watcher.moved(src_id, dst_id)
