"""The blocks of one cache group in one tier: who holds them, which are published, which can be had."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from quire.memory.eviction import EvictionPolicy
from quire.memory.prefix_index import PrefixIndex
from quire.memory.residency import BlockWatcher

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
    """Blocks that were idle when the prefix cache was reset: free in all but name, until they are wanted."""

    idle: EvictionPolicy
    published: PrefixIndex


class BlockPool:
    """The blocks of one group; block 0 is the null block, never handed out.

    A block is *used* (it has holders), *idle* (none, but published) or *free*. A pool that shares its bytes with
    others has further blocks that are lent to it when it needs them.

    Args:
        num_ids: blocks of the group's view of the memory, the null block included.
        policy: makes an eviction policy, which holds the idle blocks.
        free: blocks to start with.

    Attributes:
        idle: the policy.
        index: of the published blocks.
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
        "retired",
        "watcher",
    )

    def __init__(self, num_ids: int, policy: Callable[[], EvictionPolicy], free: Iterable[int] = ()) -> None:
        self._policy = policy
        self.idle = policy()
        self.index = PrefixIndex(num_ids - 1)
        self.retired: list[Retired] = []
        self.ref_counts = [0] * num_ids
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
        while len(taken) < count:
            victims = self.next_victims(count - len(taken))
            assert victims, "more blocks are taken than there are"
            self.evict(victims)
            taken += victims
        for block_id in taken:
            ref_counts[block_id] = 1
        self.num_used += count
        if self.watcher is not None:
            self.watcher.taken(taken)
        return taken

    def retain(self, block_ids: Sequence[int]) -> None:
        """Add one holder to each block, all different; an idle block becomes used."""
        ref_counts = self.ref_counts
        woken = [block_id for block_id in block_ids if not ref_counts[block_id]]
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
        """Remove one holder from each block, all different; without one it becomes idle if published, else free."""
        ref_counts = self.ref_counts
        released = list(block_ids)
        is_shared = len(released) != [ref_counts[block_id] for block_id in released].count(1)
        for block_id in released:
            ref_counts[block_id] -= 1
        if is_shared:
            released = [block_id for block_id in released if not ref_counts[block_id]]
        self.num_used -= len(released)
        rested, freed = self.index.split(released)
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
        # A block that was still used at an earlier reset may have left its name there: the latest knows it.
        idle, index = next(known for known in reversed(self.retired) if block_id in known.published)
        idle.forget((block_id,))
        index.remove((block_id,))
        self.retired = [known for known in self.retired if known.idle]
        return True

    def withdraw(self, block_id: int) -> None:
        """Take a used block that is about to be written out of the index."""
        self.index.remove((block_id,))
        self.idle.forget((block_id,))

    def reset(self) -> None:
        """Make nothing published be found again, in constant time: what is idle is evicted as it is wanted."""
        if self.idle:
            self.retired.append(Retired(self.idle, self.index))
        has_siblings = self.index.siblings is not None
        self.idle, self.index = self._policy(), PrefixIndex(len(self.ref_counts) - 1, has_siblings=has_siblings)

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
