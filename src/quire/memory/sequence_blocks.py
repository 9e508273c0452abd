"""What memory keeps of one live sequence: its block tables and how far they are filled, stored and published."""

from __future__ import annotations

from typing import NamedTuple

from quire.memory.prefix.token_chain import TokenChain
from quire.memory.results import BlockCopy, TableDelta, Tier


class StateBackup(NamedTuple):
    """States that are held so that a sequence can go back to them.

    Args:
        num_tokens: that they sum up.
        block_ids: by group; none where no token was computed.
    """

    num_tokens: int
    block_ids: dict[int, int]


class SequenceBlocks:
    """What the manager keeps of one live sequence.

    Args:
        chain: its tokens and their identities.
        num_groups: cache groups.
        is_publishing: False when full blocks are not to enter the prefix index: caching is off, or was reset since.

    Attributes:
        tables: per group, the block ids; dead blocks are null entries, as is all but the last of a state's. Empty while
            the sequence is swapped out.
        host_tables: the same with ids of the host tier while it is swapped out, else None.
        num_dead: per group, the leading null entries.
        num_slots: tokens with a slot.
        num_computed: tokens whose KV is stored.
        num_published: leading blocks that are in the prefix index, or were when they filled.
        is_publishing: becomes False once a digest of the chain is found to collide; nothing after it is published.
        next_event: the least `num_computed` at which a block fills that is to be published, or a block dies.
        stops: lengths at which snapshots of states are taken besides the regular ones.
        kept_places: numbers of blocks behind which the next prompt may go on or part: where this one ends, as far as it
            can be hit, and where it was seen to part. What is read there is not evicted before other blocks.
        opened_on: the length of the snapshots of states that it opened on, as long as no later one of its own takes
            their place; else 0.
        regular_snapshot: the same of its last regular snapshots.
        checkpoint: states from before what is looked ahead, None where nothing is.
        has_exclusive_tail: True when the partly filled last block is known to be held by this sequence alone and not
            published; `fork` and `truncate` are all that can change it.
        dirty_from: per group, the first table entry that the data plane does not know.
        is_dirty: True when any such entry exists.
    """

    __slots__ = (
        "chain",
        "checkpoint",
        "dirty_from",
        "host_tables",
        "is_dirty",
        "is_publishing",
        "kept_places",
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
        self.kept_places: tuple[int, ...] = ()
        self.opened_on = 0
        self.regular_snapshot = 0
        self.checkpoint: StateBackup | None = None
        self.tail_is_private = True
        self.dirty_from = [0] * num_groups
        self.is_dirty = True

    @property
    def is_swapped(self) -> bool:
        """Say whether its blocks are on the host."""
        return self.host_tables is not None

    def tables_on(self, tier: Tier) -> list[list[int]]:
        """Return the block tables with ids of a tier; without entries where it has nothing there."""
        if tier is Tier.DEVICE:
            return self.tables
        return [[] for _ in self.tables] if self.host_tables is None else self.host_tables

    def mark_dirty(self, group_idx: int, start: int) -> None:
        """Note that table entries from `start` on changed."""
        self.dirty_from[group_idx] = min(self.dirty_from[group_idx], start)
        self.is_dirty = True

    def follow(self, move: BlockCopy) -> None:
        """Name a block that moved within its tier by its new id."""
        table = self.tables_on(move.src_tier)[move.group_idx]
        if move.src_id in table:
            block_idx = table.index(move.src_id)
            table[block_idx] = move.dst_id
            if move.src_tier is Tier.DEVICE:
                self.mark_dirty(move.group_idx, block_idx)
        held = self.checkpoint.block_ids if self.checkpoint and move.src_tier is Tier.DEVICE else {}
        if held.get(move.group_idx) == move.src_id:
            held[move.group_idx] = move.dst_id

    def take_deltas(self) -> tuple[TableDelta, ...]:
        """Hand over the table entries that changed since the last call."""
        if not self.is_dirty:
            return ()
        deltas = []
        for idx, table in enumerate(self.tables):
            start, self.dirty_from[idx] = self.dirty_from[idx], len(table)
            deltas.append(TableDelta(idx, start, tuple(table[start:])))
        self.is_dirty = False
        return tuple(deltas)

    def fork(self, chain: TokenChain) -> SequenceBlocks:
        """Return what memory keeps of a child that has all that this sequence has; holders are not counted here."""
        child = SequenceBlocks(chain, len(self.tables), is_publishing=self.is_publishing)
        child.tables = [table.copy() for table in self.tables]
        child.num_skipped = self.num_skipped.copy()
        child.num_slots = self.num_slots
        child.num_computed = self.num_computed
        child.num_published = self.num_published
        child.next_publish_at = self.next_publish_at
        child.snapshot_points = self.snapshot_points
        child.kept_places = self.kept_places
        child.opened_on = self.opened_on
        child.regular_snapshot = self.regular_snapshot
        self.tail_is_private = child.tail_is_private = False
        return child
