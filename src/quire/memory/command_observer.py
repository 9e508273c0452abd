"""The interface of observers of a memory manager's commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.memory.prefix.radix_node import NodePosition
from quire.memory.prefix.token_chain import TokenChain
from quire.memory.results import FetchedBlock, MemoryOps, PrefixHit, TableDelta
from quire.memory.sequence_blocks import SequenceBlocks


class CommandObserver(Protocol):
    """Receives each command after it took effect, with the arguments of the method of `KVCacheManager`.

    A command that raised an error changed nothing, and is not reported. An observer changes nothing either.
    """

    def allocated(self, seq_id: int, chain: TokenChain, hit: PrefixHit) -> None: ...

    def appended(
        self, seq_ids: Sequence[int], num_tokens: int, lookahead: int, num_granted: int, *, atomic: bool
    ) -> None:
        """The first `num_granted` sequences got their slots."""

    def forked(self, parent_id: int, child_id: int, num_slots: int) -> None: ...

    def truncated(self, seq_id: int, num_tokens: int) -> None: ...

    def published(self, seq_id: int, state: SequenceBlocks, num_before: int) -> None:
        """The sequence had `num_before` published blocks before, and has `state.num_published` now."""

    def freed(
        self, seq_id: int, state: SequenceBlocks, *, retain: bool, is_sound: bool, tail: NodePosition | None
    ) -> None:
        """`tail` is the tree position of the partly filled last block's tokens; None if they are not published."""

    def swapped_out(self, seq_ids: Sequence[int]) -> None: ...

    def swapped_in(self, seq_ids: Sequence[int]) -> None: ...

    def was_reset(self) -> None: ...

    def pinned(self, name: str, chain: TokenChain, num_tokens: int) -> None: ...

    def unpinned(self, name: str) -> None: ...

    def copies_discarded(self, ops: MemoryOps) -> None: ...

    def ops_taken(self, ops: MemoryOps) -> None: ...

    def deltas_taken(self, seq_ids: Sequence[int], deltas: Sequence[tuple[TableDelta, ...]]) -> None: ...

    def loads_published(self, chain: TokenChain, num_blocks: int, fetched: Sequence[FetchedBlock]) -> None: ...
