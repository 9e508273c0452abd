"""Observer of a pool's block events. Memory has no clock: the observer adds times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class BlockObserver(Protocol):
    """Listens to one pool; it changes nothing there, and may look at some of the blocks only."""

    def on_allocate(self, block_ids: Sequence[int]) -> None:
        """Hear of blocks that were handed out, with new contents to come."""
        ...

    def on_reuse(self, block_ids: Sequence[int]) -> None:
        """Hear of idle blocks that were hit."""
        ...

    def on_idle(self, block_ids: Sequence[int]) -> None:
        """Hear of published blocks that lost their last holder."""
        ...

    def on_evict(self, block_ids: Sequence[int]) -> None:
        """Hear of idle blocks that were taken back."""
        ...

    def on_move(self, src_id: int, dst_id: int) -> None:
        """Hear of a used block whose contents another block has now."""
        ...
