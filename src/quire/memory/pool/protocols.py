"""Protocols of the objects that a pool calls: a block source, a sink of evicted blocks, a block observer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.memory.pool.idle_blocks import Part


class BlockSource(Protocol):
    """Source of blocks for a pool that shares an arena with others; it receives every change of a block's state."""

    def reserve(self, count: int) -> None:
        """Make `count` blocks of the pool free."""

    def on_allocate(self, block_ids: Sequence[int]) -> None:
        """Record that free blocks have holders now."""

    def on_reuse(self, parts: Sequence[Part]) -> None:
        """Record that idle blocks have holders now."""

    def on_idle(self, parts: Sequence[Part]) -> None:
        """Record that published blocks have no holders any more."""

    def on_reprioritise(self, old: Sequence[Part], new: Sequence[Part]) -> None:
        """Record that idle blocks have another retention priority, or another tick."""

    def on_free(self, block_ids: Sequence[int]) -> None:
        """Record that used blocks are free now."""

    def on_empty(self, parts: Sequence[Part]) -> None:
        """Record that idle blocks are free now."""


class EvictionSink(Protocol):
    """The lower tier, which may store evicted blocks."""

    def keep(self, block_ids: Sequence[int]) -> None:
        """Store idle blocks that are about to be evicted, in this order."""


class BlockObserver(Protocol):
    """Listens to one pool, and changes nothing there. Memory has no clock: the observer adds times.

    Attributes:
        sample: ids of the blocks that it observes; an allocation of other blocks is not reported.
    """

    @property
    def sample(self) -> frozenset[int]: ...

    def on_allocate(self, block_ids: Sequence[int]) -> None:
        """Record that blocks, some of them in `sample`, were allocated for new contents."""

    def on_reuse(self, block_ids: Sequence[int]) -> None:
        """Record that idle blocks were hit."""

    def on_idle(self, block_ids: Sequence[int]) -> None:
        """Record that published blocks lost their last holder."""

    def on_evict(self, block_ids: Sequence[int]) -> None:
        """Record that idle blocks are evicted."""

    def on_move(self, src_id: int, dst_id: int) -> None:
        """Record that a used block's contents moved to another block."""
