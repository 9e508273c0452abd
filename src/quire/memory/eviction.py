"""Which idle block is taken back first. A policy holds the idle blocks in its own order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """The idle blocks of one pool, in the order in which they would be evicted."""

    def add(self, block_id: int) -> None:
        """Take in a block that has just become idle."""
        ...

    def discard(self, block_id: int) -> None:
        """Let go of a block that is used again."""
        ...

    def evict(self) -> int:
        """Remove the next victim and return it."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


class LeastRecentlyUsed:
    """Evicts the block that has been idle for longest; sequences give back tails before heads."""

    __slots__ = ("_order",)

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def add(self, block_id: int) -> None:
        """Take in a block that has just become idle."""
        self._order[block_id] = None

    def discard(self, block_id: int) -> None:
        """Let go of a block that is used again."""
        del self._order[block_id]

    def evict(self) -> int:
        """Remove the next victim and return it."""
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)


EVICTION_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LeastRecentlyUsed}
