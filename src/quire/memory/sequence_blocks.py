"""One live sequence: its block tables, and its numbers of slots, computed tokens and published blocks."""

from __future__ import annotations

from typing import NamedTuple

from quire.memory.prefix.token_chain import TokenChain
from quire.memory.results import BlockCopy, Tier


class StateBackup(NamedTuple):
    """Recurrent states that are held so that a sequence can be rolled back to them.

    Args:
        num_tokens: number of tokens that the states include.
        block_ids: block of each recurrent group; empty where no token was computed.
    """

    num_tokens: int
    block_ids: dict[int, int]


class SequenceBlocks:
    """Block tables and counters of one live sequence.

    Args:
        chain: tokens of the sequence and their identities.
        num_groups: number of cache groups.
        is_publishing: False where full blocks do not enter the prefix index: caching is off, or was reset since.

    Attributes:
        tables: block table of each group; blocks out of the window are null entries, as are all but the last entry of
            a recurrent group. Empty while the sequence is swapped out.
        host_tables: block ids of the host tier while the sequence is swapped out, else None.
        num_skipped: number of leading null entries of each group.
        num_slots: number of tokens with a slot.
        num_computed: number of tokens whose keys and values are stored.
        num_published: number of leading blocks that are published, or were when they filled.
        is_publishing: False once a digest of the chain collides; no later block is published.
        next_publish_at: least `num_computed` at which a block is published, or leaves the window.
        snapshot_points: lengths at which snapshots of states are taken in addition to the regular ones.
        branch_points: numbers of blocks after which the next prompt may continue or diverge: the longest possible hit
            of this prompt, and where it diverged from the tree. Blocks that are read there are not evicted first.
        opened_on: length of the snapshots that the sequence started from, until a later snapshot of its own supersedes
            them; else 0.
        regular_snapshot: length of its last regular snapshots, with the same rule.
        checkpoint: state backup from before the lookahead slots; None without lookahead slots.
        tail_is_private: True where the partly filled last block is known to have no other holder and not to be
            published; only `fork` and `truncate` change it.
        dirty_from: first block table entry of each group that the data plane does not have yet.
        is_dirty: True where there is such an entry.
    """

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
        """True where the blocks are on the host."""
        return self.host_tables is not None

    def tables_on(self, tier: Tier) -> list[list[int]]:
        """Return the block tables with ids of a tier; empty where the sequence has no blocks there."""
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
        held = self.checkpoint.block_ids if self.checkpoint and move.src_tier is Tier.DEVICE else {}
        if held.get(move.group_idx) == move.src_id:
            held[move.group_idx] = move.dst_id

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
