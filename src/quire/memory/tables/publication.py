"""Publication over the life of a sequence: from its hit, block by block, to its partly filled last block."""

from __future__ import annotations

from collections.abc import Sequence

from quire.memory.groups.partial_block import publish_tail
from quire.memory.prefix.radix_node import NodePosition
from quire.memory.results import PrefixHit
from quire.memory.sequence_blocks import SequenceBlocks
from quire.memory.tables.publish import free_out_of_window, next_publish_at, publish_blocks, retain_for_next_turn
from quire.memory.tables.snapshots import Snapshots
from quire.memory.tables.tables import BlockTables


class Publication:
    """Publishes the full blocks, due snapshots and tails of sequences, and frees the blocks out of their windows."""

    __slots__ = ("_snapshots", "_tables", "_windowed_groups", "num_merges")

    def __init__(
        self, tables: BlockTables, windowed_groups: tuple[int, ...], snapshot_interval: int | None = None
    ) -> None:
        self._tables = tables
        self._windowed_groups = windowed_groups
        self._snapshots = Snapshots.of(tables.groups, snapshot_interval)
        self.num_merges = 0

    def begin(self, state: SequenceBlocks, hit: PrefixHit) -> None:
        """Compute a new sequence's first publication point and its snapshot points; its tokens are its prompt."""
        tables = self._tables
        state.next_publish_at = next_publish_at(tables.groups, self._windowed_groups, state)
        if tables.recurrent_groups:
            size = tables.groups[0].spec.block_size
            state.snapshot_points = self._snapshots.snapshot_points_of(state.chain, hit, size)

    def step_limit(self, state: SequenceBlocks, num_tokens: int) -> int:
        """Return how many of a sequence's next tokens may be computed in one step; see `KVCacheManager.step_limit`."""
        if not self._tables.recurrent_groups or not state.is_publishing:
            return num_tokens
        return min(num_tokens, self._snapshots.next_after(state.num_slots, state.snapshot_points) - state.num_slots)

    def is_snapshot_pending(self, state: SequenceBlocks) -> bool:
        """Return whether a snapshot is due once all slots of a sequence are computed, before it gets another slot."""
        return bool(self._tables.recurrent_groups) and state.is_publishing and self._snapshots.is_point(state)

    def add_computed(self, seq_ids: Sequence[int]) -> dict[int, int]:
        """Count one more computed token of each sequence without anything to publish; return the others' new counts."""
        sequences, is_observed = self._tables.sequences, self._tables.observer is not None
        others: dict[int, int] = {}
        for seq_id in seq_ids:
            state = sequences[seq_id]
            count = state.num_computed + 1
            if count >= state.next_publish_at or count > state.num_slots or state.checkpoint is not None or is_observed:
                others[seq_id] = count
            else:
                state.num_computed = count
        return others

    def publish_due(self, state: SequenceBlocks) -> None:
        """Publish the full blocks and due snapshots of a sequence, and free blocks out of its windows."""
        tables = self._tables
        tables.version += 1
        if state.is_publishing:
            num_full = state.num_computed // tables.groups[0].spec.block_size
            self.num_merges += publish_blocks(tables.groups, state, num_full)
        if tables.recurrent_groups and state.is_publishing and self._snapshots.is_due(state):
            self.num_merges += self._snapshots.publish(tables.groups, state)
        for idx in self._windowed_groups:
            free_out_of_window(tables.groups[idx], state, idx)
        state.next_publish_at = next_publish_at(tables.groups, self._windowed_groups, state)

    def end(self, state: SequenceBlocks) -> NodePosition | None:
        """Publish the tail of a sequence that ends, and restore the priority of blocks that its next turn will read."""
        tail = publish_tail(self._tables.groups, state)
        for idx in self._windowed_groups:
            retain_for_next_turn(self._tables.groups[idx], state)
        return tail
