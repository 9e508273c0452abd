"""Retained blocks: blocks of requests with `retain_cache`, up to a limit, are evicted last.

Retention reserves nothing: a sequence that needs memory evicts retained blocks when no other idle blocks are left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator

from quire.memory.pool.slab_layout import SlabLayout


class Retention:
    """The published blocks of all groups with a retention hint; beyond the limit, the oldest hints are dropped."""

    __slots__ = ("_layout", "_order", "limit", "num_bytes", "of_group")

    def __init__(self, layout: SlabLayout, limit: int) -> None:
        self._layout = layout
        self.limit = limit
        self.of_group: tuple[set[int], ...] = tuple(set() for _ in layout.block_bytes)
        self.num_bytes = 0
        self._order: OrderedDict[tuple[int, int], None] = OrderedDict()

    @property
    def limit_bytes(self) -> int:
        """Bytes that blocks with the hint may fill."""
        return self.limit * self._layout.slab_bytes

    def clear(self) -> None:
        """Forget all hints."""
        for hints in self.of_group:
            hints.clear()
        self.num_bytes = 0
        self._order.clear()

    def hints(self) -> Iterator[tuple[int, int]]:
        """Yield (group, block) of each block with the hint, the oldest hint first."""
        return iter(self._order)

    def add(self, group_idx: int, block_id: int) -> list[tuple[int, int]]:
        """Give a block the hint, or renew its hint; return (group, block) of each hint dropped to keep the limit."""
        if block_id in self.of_group[group_idx]:
            self._order.move_to_end((group_idx, block_id))
            return []
        self.of_group[group_idx].add(block_id)
        self._order[group_idx, block_id] = None
        self.num_bytes += self._layout.block_bytes[group_idx]
        dropped = []
        while self.num_bytes > self.limit_bytes:
            oldest = next(iter(self._order))
            self.drop(oldest[0], oldest[1:])
            dropped.append(oldest)
        return dropped

    def drop(self, group_idx: int, block_ids: Collection[int]) -> None:
        """Remove the hint from a group's blocks; blocks without the hint are ignored."""
        for block_id in self.of_group[group_idx].intersection(block_ids):
            self.of_group[group_idx].discard(block_id)
            del self._order[group_idx, block_id]
            self.num_bytes -= self._layout.block_bytes[group_idx]
