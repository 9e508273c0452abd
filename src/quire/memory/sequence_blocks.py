"""One live sequence: its block tables, and its numbers of slots, computed tokens and published blocks."""

from __future__ import annotations

from typing import NamedTuple

from quire.memory.prefix.token_chain import TokenChain
from quire.memory.results import BlockCopy, Tier


class StateBackup(NamedTuple):
    """Recurrent states that are held so that a sequence can be rolled back to them.

    Args:
        num_tokens: number of tokens that the states include.
        block_ids: block of each recurrent group; empty if no token was computed.
    """

    num_tokens: int
    block_ids: dict[int, int]


class SequenceBlocks:
    """Block tables and counters of one live sequence."""

    __slots__ = (
        "branch_points",
        "chain",
        "checkpoint",
        "dirty_from",
        "host_tables",
        "is_dirty",
        "is_publishing",
        "next_publish_at",
        "num_computed",
        "num_published",
        "num_skipped",
        "num_slots",
        "opened_on",
        "regular_snapshot",
        "snapshot_points",
        "tables",
        "tail_is_private",
    )

    def __init__(self, chain: TokenChain, num_groups: int, *, is_publishing: bool) -> None:
        self.chain = chain
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.host_tables: list[list[int]] | None = None
        self.num_skipped = [0] * num_groups
        self.num_slots = 0
        self.num_computed = 0
        self.num_published = 0
        self.is_publishing = is_publishing
        self.next_publish_at = 0
        self.snapshot_points: tuple[int, ...] = ()
        self.branch_points: tuple[int, ...] = ()
        self.opened_on = 0
        self.regular_snapshot = 0
        self.checkpoint: StateBackup | None = None
        self.tail_is_private = True
        self.dirty_from = [0] * num_groups
        self.is_dirty = True

    @property
    def is_swapped(self) -> bool:
        """True if the blocks are on the host."""
        return self.host_tables is not None

    def tables_on(self, tier: Tier) -> list[list[int]]:
        """Return the block tables with ids of a tier; empty tables if the sequence has no blocks there."""
        if tier is Tier.DEVICE:
            return self.tables
        return [[] for _ in self.tables] if self.host_tables is None else self.host_tables

    def mark_dirty(self, group_idx: int, start: int) -> None:
        """Record that table entries from `start` on changed."""
        self.dirty_from[group_idx] = min(self.dirty_from[group_idx], start)
        self.is_dirty = True

    def apply_move(self, move: BlockCopy) -> None:
        """Replace the id of a block that moved within its tier."""
        table = self.tables_on(move.src_tier)[move.group_idx]
        if move.src_id in table:
            block_idx = table.index(move.src_id)
            table[block_idx] = move.dst_id
            if move.src_tier is Tier.DEVICE:
                self.mark_dirty(move.group_idx, block_idx)
        backup_ids = self.checkpoint.block_ids if self.checkpoint and move.src_tier is Tier.DEVICE else {}
        if backup_ids.get(move.group_idx) == move.src_id:
            backup_ids[move.group_idx] = move.dst_id

    def fork(self, chain: TokenChain) -> SequenceBlocks:
        """Return a child with the same tables and counters; the caller increments the reference counts."""
        child = SequenceBlocks(chain, len(self.tables), is_publishing=self.is_publishing)
        child.tables = [table.copy() for table in self.tables]
        child.num_skipped = self.num_skipped.copy()
        child.num_slots = self.num_slots
        child.num_computed = self.num_computed
        child.num_published = self.num_published
        child.next_publish_at = self.next_publish_at
        child.snapshot_points = self.snapshot_points
        child.branch_points = self.branch_points
        child.opened_on = self.opened_on
        child.regular_snapshot = self.regular_snapshot
        self.tail_is_private = child.tail_is_private = False
        return child
