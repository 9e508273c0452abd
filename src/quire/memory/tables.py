"""The block tables of all live sequences: how they grow, and what must be copied for that."""

from __future__ import annotations

from collections.abc import Sequence

from quire.memory.arena import Arena
from quire.memory.chain import TOKEN_BYTES
from quire.memory.groups import CacheGroup
from quire.memory.ops import BlockCopy
from quire.memory.pins import Pins
from quire.memory.sequence_memory import SequenceMemory


class BlockTables:
    """Who has which blocks, and the movements that are asked for but not yet handed over.

    Args:
        arena: of the blocks.
        groups: the cache groups, one for each of its pools.
        pins: what is held by name.

    Attributes:
        sequences: by id, those that are live.
        pending_copies: movements, in order.
        version: rises with every change that could make a prefix hit stale.
        num_copies: blocks copied on write.
    """

    __slots__ = ("arena", "groups", "num_copies", "pending_copies", "pins", "sequences", "version")

    def __init__(self, arena: Arena, groups: Sequence[CacheGroup], pins: Pins) -> None:
        self.arena = arena
        self.groups = tuple(groups)
        self.pins = pins
        self.sequences: dict[int, SequenceMemory] = {}
        self.pending_copies: list[BlockCopy] = []
        self.version = 0
        self.num_copies = 0

    def grow(self, state: SequenceMemory, end: int) -> bool:
        """Give a sequence slots up to `end` in every group, or change nothing.

        Before the tail block is written (M3), it is copied where it is shared, and where it is published, as long as
        there is room for that. Else, and where it is a published tail of which this sequence uses all, its last
        holder takes it out of the prefix index and writes it in place.

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
        if offset and not state.has_exclusive_tail:
            copied = sorted(copied + self._kept(state, tail, offset, needs))
        state.num_slots = end
        if offset and not state.has_exclusive_tail:
            self._withdraw(state, tail, copied)
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

    def take(self, group_idx: int, count: int) -> list[int]:
        """Take blocks of a group; where others had to move for that, their tables follow."""
        block_ids = self.groups[group_idx].pool.take(count)
        moves, self.arena.moves = self.arena.moves, []
        for move in moves:
            self.pending_copies.append(move)
            self.pins.follow(move)
            for state in self.sequences.values():
                table = state.tables[move.group_idx]
                if move.src_id in table:
                    block_idx = table.index(move.src_id)
                    table[block_idx] = move.dst_id
                    state.mark_dirty(move.group_idx, block_idx)
        return block_ids

    def _kept(self, state: SequenceMemory, block_idx: int, offset: int, needs: list[int]) -> list[int]:
        """Return the groups whose tail is to be copied only so that it stays published, and count that as needed.

        All groups or none: of what is missing in one group, the others make no hit.
        """
        kept = []
        for idx, group in enumerate(self.groups):
            block_id = state.tables[idx][block_idx]
            link = group.pool.index.link_of(block_id)
            if link is not None and group.pool.ref_counts[block_id] == 1 and offset * TOKEN_BYTES < len(link[1]):
                kept.append(idx)
        more = [need + (idx in kept) for idx, need in enumerate(needs)]
        if not kept or not self.arena.can_hold(more):
            return []
        needs[:] = more
        return kept

    def _withdraw(self, state: SequenceMemory, block_idx: int, copied: Sequence[int]) -> None:
        """Take a block that is about to be written in place out of the prefix index, in all groups but some."""
        for idx, (group, table) in enumerate(zip(self.groups, state.tables, strict=True)):
            block_id = table[block_idx]
            if idx not in copied and block_id in group.pool.index:
                group.pool.withdraw(block_id)
                self.version += 1

    def _copy_on_write(self, state: SequenceMemory, group_idx: int, block_idx: int) -> None:
        """Replace a table entry by a private copy of its block."""
        # Take before release: the copy must not be made onto its own source. Once it is released, the source may be
        # evicted and written by a later copy of the list, or by the step; both come after this copy has read it.
        (new,) = self.take(group_idx, 1)
        table = state.tables[group_idx]
        old, table[block_idx] = table[block_idx], new
        self.groups[group_idx].pool.release((old,))
        state.mark_dirty(group_idx, block_idx)
        self.pending_copies.append(BlockCopy(group_idx, old, new))
        self.num_copies += 1
        self.version += 1
