"""The block tables of all live sequences, on both tiers: how they grow, and what must be copied for that."""

from __future__ import annotations

from collections.abc import Sequence

from quire.memory.arena import Arena
from quire.memory.groups import CacheGroup
from quire.memory.host_tier import HostTier
from quire.memory.ops import BlockCopy, Tier
from quire.memory.pins import Pins
from quire.memory.sequence_memory import SequenceMemory


class BlockTables:
    """Who has which blocks, and the movements that are asked for but not yet handed over.

    Args:
        arena: of the blocks.
        groups: the cache groups, one for each of its pools.
        pins: what is held by name.
        host: the tier below the device, if there is one.

    Attributes:
        sequences: by id, those that are live.
        pending_copies: movements, in order.
        version: rises with every change that could make a prefix hit stale.
        num_copies: blocks copied on write.
    """

    __slots__ = ("arena", "groups", "host", "num_copies", "pending_copies", "pins", "sequences", "version")

    def __init__(self, arena: Arena, groups: Sequence[CacheGroup], pins: Pins, host: HostTier | None = None) -> None:
        self.arena = arena
        self.groups = tuple(groups)
        self.pins = pins
        self.host = host
        self.sequences: dict[int, SequenceMemory] = {}
        self.pending_copies: list[BlockCopy] = []
        self.version = 0
        self.num_copies = 0

    def grow(self, state: SequenceMemory, end: int) -> bool:
        """Give a sequence slots up to `end` in every group, or change nothing.

        Before the tail block is written (M3), it is copied where it is shared; where this sequence is its last
        holder and it is published, it leaves the prefix index instead.

        Returns:
            False when some group lacks the blocks.
        """
        tail, offset = divmod(state.num_slots, self.groups[0].spec.block_size)
        needs = [
            group.spec.num_blocks(end) - len(table) for group, table in zip(self.groups, state.tables, strict=True)
        ]
        copied = []
        if offset and not state.has_exclusive_tail:
            copied = [
                idx for idx, group in enumerate(self.groups) if group.pool.ref_counts[state.tables[idx][tail]] > 1
            ]
            for idx in copied:
                needs[idx] += 1
        if any(needs) and not self.arena.can_hold(needs):
            return False
        state.num_slots = end
        if offset and not state.has_exclusive_tail:
            self._withdraw(state, tail)
            state.has_exclusive_tail = True
        for idx in copied:
            self._copy_on_write(state, idx, tail)
            needs[idx] -= 1
        for idx, fresh in enumerate(needs):
            if fresh:
                block_ids = self.take(idx, fresh)
                table = state.tables[idx]
                state.mark_dirty(idx, len(table))
                table += block_ids
                self.version += 1
        return True

    def shrink(self, state: SequenceMemory, num_tokens: int) -> None:
        """Give back the blocks of a sequence behind `num_tokens` tokens, the last one first."""
        for idx, group in enumerate(self.groups):
            table = state.tables[idx]
            keep = group.spec.num_blocks(num_tokens)
            if keep < len(table):
                group.pool.release(reversed(table[keep:]))
                del table[keep:]
                state.mark_dirty(idx, keep)
        state.num_slots = num_tokens
        state.has_exclusive_tail = False

    def take(self, group_idx: int, count: int, tier: Tier = Tier.DEVICE) -> list[int]:
        """Take blocks of a group; where others had to move for that, their tables follow."""
        block_ids = self.groups_on(tier)[group_idx].pool.take(count)
        for move in self.arena.moves:
            self.pending_copies.append(move)
            if move.src_tier is move.dst_tier:
                self._follow(move)
        self.arena.moves.clear()
        return block_ids

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Hand over the movements that are asked for."""
        copies, self.pending_copies = tuple(self.pending_copies), []
        return copies

    def resident(self, seq_id: int) -> SequenceMemory:
        """Return what is kept of a live sequence whose blocks are on the device.

        Raises:
            ValueError: it is swapped out.
        """
        state = self.sequences[seq_id]
        if state.host_tables is not None:
            raise ValueError(f"sequence {seq_id} is swapped out")
        return state

    def groups_on(self, tier: Tier) -> tuple[CacheGroup, ...]:
        """Return the cache groups with their blocks in a tier."""
        if tier is Tier.DEVICE:
            return self.groups
        assert self.host is not None, "there is no host tier"
        return self.host.groups

    def family(self, seq_ids: Sequence[int], tier: Tier) -> list[SequenceMemory]:
        """Return what is kept of sequences that are to leave a tier together.

        Raises:
            ValueError: one is not there, is named twice, or has slots that are not written yet.
        """
        if len(set(seq_ids)) != len(seq_ids):
            raise ValueError(f"a sequence is named twice in {list(seq_ids)}")
        states = [self.sequences[seq_id] for seq_id in seq_ids]
        for seq_id, state in zip(seq_ids, states, strict=True):
            if state.is_swapped != (tier is Tier.HOST):
                raise ValueError(f"sequence {seq_id} is {'' if state.is_swapped else 'not '}swapped out")
            if state.num_slots != state.num_computed:
                raise ValueError(f"sequence {seq_id} has {state.num_slots - state.num_computed} unwritten slots")
        return states

    def _follow(self, move: BlockCopy) -> None:
        """Name a block that moved within its tier by its new id."""
        if move.src_tier is Tier.DEVICE:
            self.pins.follow(move)
        for state in self.sequences.values():
            table = state.tables_on(move.src_tier)[move.group_idx]
            if move.src_id in table:
                block_idx = table.index(move.src_id)
                table[block_idx] = move.dst_id
                if move.src_tier is Tier.DEVICE:
                    state.mark_dirty(move.group_idx, block_idx)

    def _withdraw(self, state: SequenceMemory, block_idx: int) -> None:
        """Take a block that is about to be written in place out of the prefix index."""
        for group, table in zip(self.groups, state.tables, strict=True):
            block_id = table[block_idx]
            if block_id in group.pool.index and group.pool.ref_counts[block_id] == 1:
                group.pool.withdraw(block_id)
                self.version += 1

    def _copy_on_write(self, state: SequenceMemory, group_idx: int, block_idx: int) -> None:
        """Replace a table entry by a private copy of its block."""
        # Take before release: the copy must not be made onto its own source.
        (new,) = self.take(group_idx, 1)
        table = state.tables[group_idx]
        old, table[block_idx] = table[block_idx], new
        self.groups[group_idx].pool.release((old,))
        state.mark_dirty(group_idx, block_idx)
        self.pending_copies.append(BlockCopy(group_idx, old, new))
        self.num_copies += 1
        self.version += 1
