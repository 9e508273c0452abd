"""The hint that a request's blocks be evicted last: which blocks carry it, within a limit, and what an eviction policy
makes of it. It is never a promise: memory that somebody needs is always had.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence

from quire.memory.eviction import PolicyMaker
from quire.memory.rest_queue import RestQueue
from quire.memory.slabs import SlabLayout


class Retention:
    """The published blocks of all groups that carry the hint; where they are too many, the oldest hints go.

    Args:
        layout: of the arena.
        limit: slabs (with one group: blocks) whose bytes these blocks may fill.

    Attributes:
        of_group: for each group, the blocks with the hint.
        num_bytes: bytes of all of them.
    """

    __slots__ = ("_in_slab", "_layout", "_order", "limit", "num_bytes", "of_group")

    def __init__(self, layout: SlabLayout, limit: int) -> None:
        self._layout = layout
        self.limit = limit
        self.clear()

    @property
    def limit_bytes(self) -> int:
        """Bytes that blocks with the hint may fill."""
        return self.limit * self._layout.slab_bytes

    def clear(self) -> None:
        """Forget all hints, in constant time."""
        self.of_group: tuple[set[int], ...] = tuple(set() for _ in self._layout.block_bytes)
        self.num_bytes = 0
        self._order: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._in_slab: Counter[tuple[int, int]] = Counter()

    def hints(self) -> Iterator[tuple[int, int]]:
        """Yield (group, block) of each block with the hint, that of the oldest hint first."""
        return iter(self._order)

    def is_in_slab(self, group_idx: int, slab: int) -> bool:
        """Say whether a block of a group's slab carries the hint."""
        return self._in_slab[group_idx, slab] > 0

    def add(self, group_idx: int, block_id: int) -> list[tuple[int, int]]:
        """Give a block the hint, anew if it has it.

        Returns:
            The (group, block) pairs that lost theirs for it.
        """
        if block_id in self.of_group[group_idx]:
            self._order.move_to_end((group_idx, block_id))
            return []
        self.of_group[group_idx].add(block_id)
        self._order[group_idx, block_id] = None
        self._count(group_idx, block_id, 1)
        dropped = []
        while self.num_bytes > self.limit_bytes:
            oldest = next(iter(self._order))
            self.drop(oldest[0], oldest[1:])
            dropped.append(oldest)
        return dropped

    def drop(self, group_idx: int, block_ids: Collection[int]) -> None:
        """Take the hint from those of a group's blocks that have it."""
        for block_id in self.of_group[group_idx].intersection(block_ids):
            self.of_group[group_idx].discard(block_id)
            del self._order[group_idx, block_id]
            self._count(group_idx, block_id, -1)

    def _count(self, group_idx: int, block_id: int, change: int) -> None:
        self.num_bytes += change * self._layout.block_bytes[group_idx]
        self._in_slab[group_idx, self._layout.slab_of(group_idx, block_id)] += change


class HintedLast:
    """Evicts idle blocks with the hint after all others, both in the order of a policy.

    Args:
        policy: makes the policy.
        retention: says which blocks carry the hint; they change only while they have holders.
        group_idx: whose blocks.
    """

    __slots__ = ("_group_idx", "_has_hinted", "_hinted", "_hints", "_plain", "_retention")

    keeps_rest = False

    def __init__(self, policy: PolicyMaker, retention: Retention, group_idx: int, _: RestQueue | None = None) -> None:
        self._plain, self._hinted = policy(), policy()
        self._has_hinted = False
        self._retention = retention
        self._group_idx = group_idx
        self._hints = retention.of_group[group_idx]

    def add(self, block_ids: Sequence[int]) -> None:
        """Take in blocks that have just become idle."""
        if self._hints:
            hinted, block_ids = self._split(block_ids)
            self._hinted.add(hinted)
            self._has_hinted = True
        self._plain.add(block_ids)

    def discard(self, block_ids: Sequence[int]) -> None:
        """Let go of blocks that were hit."""
        if self._hints:
            hinted, block_ids = self._split(block_ids)
            self._hinted.discard(hinted)
        self._plain.discard(block_ids)

    def forget(self, block_ids: Sequence[int]) -> None:
        """Forget all about blocks, the hint too."""
        self._plain.forget(block_ids)
        if self._has_hinted:
            self._hinted.forget(block_ids)
        if self._hints:
            self._retention.drop(self._group_idx, block_ids)

    def victims(self, count: int) -> list[int]:
        """Return the blocks that are next."""
        num_plain = min(count, len(self._plain))
        chosen = self._plain.victims(num_plain)
        return chosen + self._hinted.victims(count - num_plain) if num_plain < count else chosen

    def __len__(self) -> int:
        return len(self._plain) + len(self._hinted)

    def __iter__(self) -> Iterator[int]:
        yield from self._plain
        yield from self._hinted

    def _split(self, block_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        hints = self._hints
        hinted = [block_id for block_id in block_ids if block_id in hints]
        return hinted, [block_id for block_id in block_ids if block_id not in hints]
