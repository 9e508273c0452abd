"""Block tables of all live sequences, on both tiers: growth, copy on write, release."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from quire.memory.command_observer import CommandObserver
from quire.memory.groups.cache_group import CacheGroup
from quire.memory.groups.host_tier import HostTier
from quire.memory.pins import Pins
from quire.memory.pool.arena import Arena
from quire.memory.pool.idle_blocks import RetentionPriority
from quire.memory.pool.pool import NULL_BLOCK
from quire.memory.prefix.token_chain import TOKEN_BYTES
from quire.memory.results import BlockCopy, PrefixHit, Tier
from quire.memory.sequence_blocks import SequenceBlocks, StateBackup


class BlockTables:
    """Block tables of all live sequences, and the copies that `take_ops` has not returned yet."""

    __slots__ = (
        "arena",
        "groups",
        "host",
        "num_copies",
        "observer",
        "pending_copies",
        "pins",
        "recurrent_groups",
        "sequences",
        "token_groups",
        "version",
    )

    def __init__(self, arena: Arena, groups: Sequence[CacheGroup], pins: Pins, host: HostTier | None = None) -> None:
        self.arena = arena
        self.groups = tuple(groups)
        self.token_groups = tuple(idx for idx, group in enumerate(groups) if not group.spec.is_recurrent)
        self.recurrent_groups = tuple(idx for idx, group in enumerate(groups) if group.spec.is_recurrent)
        self.pins = pins
        self.host = host
        self.sequences: dict[int, SequenceBlocks] = {}
        self.pending_copies: list[BlockCopy] = []
        self.version = 0
        self.num_copies = 0
        self.observer: CommandObserver | None = None

    def share(self, state: SequenceBlocks, hit: PrefixHit) -> None:
        """Give a new sequence the device blocks of a hit, and its slots; blocks on the host are loaded later."""
        for idx, (group, shared) in enumerate(zip(self.groups, hit.block_ids, strict=True)):
            num_skipped = state.num_skipped[idx] = group.num_skipped(hit.num_tokens)
            live = shared[num_skipped:]
            group.pool.retain([block_id for block_id in live if block_id != NULL_BLOCK] if hit.loads else live)
            state.tables[idx] = list(shared)
        state.num_slots = state.num_computed = state.opened_on = hit.num_tokens
        state.tail_is_private = not hit.num_copied
        size = self.groups[0].spec.block_size
        state.num_published = hit.num_tokens // size
        state.branch_points = ((len(state.chain.tokens) - 1) // size, hit.diverged_at // size)

    def unpublish_all(self) -> None:
        """Unpublish all blocks, on both tiers; live sequences keep their blocks and stop publishing."""
        self.version += 1
        self.arena.retention.clear()
        for group in (*self.groups, *(self.host.groups if self.host is not None else ())):
            group.pool.reset()
        for state in self.sequences.values():
            state.is_publishing = False

    def fork(self, parent_id: int, child_id: int, child_tokens: list[int]) -> SequenceBlocks:
        """Open a child on all blocks of its parent; see `KVCacheManager.fork`."""
        parent = self.resident(parent_id)
        if child_id in self.sequences:
            raise ValueError(f"child_id must not be the ID of a live sequence, got {child_id}")
        if parent.num_slots != parent.num_computed:
            raise ValueError(f"sequence {parent_id} has {parent.num_slots - parent.num_computed} unwritten slots")
        self.version += 1
        child = parent.fork(parent.chain.fork(child_tokens))
        # The parent's chain may be encoded past its computed tokens; the child's tokens may differ there.
        child.chain.truncate(parent.num_computed)
        for group, table, num_skipped in zip(self.groups, parent.tables, parent.num_skipped, strict=True):
            group.pool.retain(table[num_skipped:])
        self.sequences[child_id] = child
        return child

    def grow(
        self, state: SequenceBlocks, end: int, *, is_lookahead: bool = False, may_copy_published: bool = True
    ) -> bool:
        """Give a sequence slots up to `end` in every group, or change nothing.

        A shared last block is copied before a write (copy-on-write, M3). A published state, and a published block that
        the sequence uses in part, are also copied if there is room. Otherwise, and for a published tail that the
        sequence uses entirely, the last holder unpublishes the block and writes it in place.
        """
        needs = [
            group.spec.num_blocks(end) - len(table) for group, table in zip(self.groups, state.tables, strict=True)
        ]
        offset = state.num_slots % self.groups[0].spec.block_size
        is_tail_written = offset > 0 and not state.tail_is_private
        if not is_tail_written and not self.recurrent_groups:
            if any(needs) and not self.arena.fits(needs):
                return False
            state.num_slots = end
            self._extend(state, needs)
            return True
        copied = self._shared(state, self.token_groups) if is_tail_written else []
        copied_to_preserve = self._used_in_part(state, offset) if is_tail_written else []
        checkpoint = None
        if self.recurrent_groups:
            if is_lookahead and state.checkpoint is None:
                checkpoint = self._checkpoint(state)
            for idx in self.recurrent_groups:
                needs[idx] = 0 if state.tables[idx] else 1
            copied += self._shared(state, self.recurrent_groups, checkpoint)
            copied_to_preserve += [
                idx for idx in self.recurrent_groups if idx not in copied and self._is_published(state, idx)
            ]
        for idx in copied:
            needs[idx] += 1
        if any(needs) and not self.arena.fits(needs):
            return False
        needs_more = [need + (idx in copied_to_preserve) for idx, need in enumerate(needs)]
        # All groups or none: a block that one group no longer has cannot be hit in the other groups.
        if copied_to_preserve and may_copy_published and self.arena.fits(needs_more):
            needs, copied = needs_more, sorted(copied + copied_to_preserve)
        state.num_slots = end
        if checkpoint is not None:
            self._hold(state, checkpoint)
        self._unpublish(state, [*(self.token_groups if is_tail_written else ()), *self.recurrent_groups], copied)
        if is_tail_written:
            state.tail_is_private = True
        for idx in copied:
            self._copy_on_write(state, idx)
            needs[idx] -= 1
        self._extend(state, needs)
        for idx in self.recurrent_groups:
            self._move_state(state, idx)
        return True

    def shrink(self, state: SequenceBlocks, num_tokens: int) -> None:
        """Release a sequence's blocks after `num_tokens` tokens, the last one first; restore its states."""
        for idx in self.token_groups:
            table = state.tables[idx]
            keep = self.groups[idx].spec.num_blocks(num_tokens)
            if keep < len(table):
                self.groups[idx].pool.release(reversed(table[keep:]))
                del table[keep:]
                state.mark_dirty(idx, keep)
        if num_tokens < state.num_slots:
            self._restore_state(state)
        state.num_slots = num_tokens
        state.tail_is_private = False

    def release(
        self,
        state: SequenceBlocks,
        tier: Tier = Tier.DEVICE,
        priority: RetentionPriority = RetentionPriority.DEFAULT,
    ) -> None:
        """Release all blocks that a sequence holds in a tier, its tail first; see `BlockPool.release` for the priority.

        Blocks of several groups become idle alternately, block by block: a hit needs the same tokens in all groups, so
        the tails of all groups should be evicted before any head.
        """
        groups, tables = self.groups_on(tier), state.tables_on(tier)
        if len(groups) == 1:
            block_ids = tables[0][state.num_skipped[0] :][::-1]
            groups[0].pool.release(list(filter(None, block_ids)) if tier is Tier.HOST else block_ids, priority)
        else:
            length, stride = max(map(len, tables)), len(groups)
            start = self.arena_on(tier).clock.ticks(length * stride).start
            for idx, (group, table) in enumerate(zip(groups, tables, strict=True)):
                first = start + (length - len(table)) * stride + idx
                block_ids = table[state.num_skipped[idx] :][::-1]
                moments: Sequence[int] = range(first, first + len(block_ids) * stride, stride)
                if tier is Tier.HOST and NULL_BLOCK in block_ids:  # the host table of a hit has some null entries
                    moments = list(compress(moments, block_ids))
                    block_ids = list(filter(None, block_ids))
                group.pool.release(block_ids, priority, moments)
        if tier is Tier.DEVICE:
            self.drop_checkpoint(state)

    def commit_lookahead(self, state: SequenceBlocks, num_computed: int) -> None:
        """Release the state backup from before the lookahead slots, since all draft tokens were accepted."""
        if num_computed < state.num_slots:
            raise ValueError(f"num_computed must be {state.num_slots}, as states include all slots, got {num_computed}")
        self.drop_checkpoint(state)
        self.version += 1

    def drop_checkpoint(self, state: SequenceBlocks) -> None:
        """Release the state backup of a sequence, if there is one."""
        if state.checkpoint is not None:
            for idx, block_id in state.checkpoint.block_ids.items():
                self.groups[idx].pool.release((block_id,))
            state.checkpoint = None

    def take(self, group_idx: int, count: int, tier: Tier = Tier.DEVICE) -> list[int]:
        """Take blocks of a group; update the block tables for blocks that were moved to make room."""
        block_ids = self.groups_on(tier)[group_idx].pool.take(count)
        self.apply_moves()
        return block_ids

    def apply_moves(self) -> None:
        """Update the block tables for blocks that were moved, and queue the copies."""
        for move in self.arena.moves:
            self.pending_copies.append(move)
            if move.src_tier is move.dst_tier:
                self._apply_move(move)
        self.arena.moves.clear()

    def resident(self, seq_id: int) -> SequenceBlocks:
        """Return the block tables of a live sequence whose blocks are on the device."""
        state = self.sequences[seq_id]
        if state.host_tables is not None:
            raise ValueError(f"sequence {seq_id} is swapped out")
        return state

    def arena_on(self, tier: Tier) -> Arena:
        """Return the arena of a tier."""
        if tier is Tier.DEVICE:
            return self.arena
        assert self.host is not None, "there is no host tier"
        return self.host.arena

    def groups_on(self, tier: Tier) -> tuple[CacheGroup, ...]:
        """Return the cache groups with their blocks in a tier."""
        if tier is Tier.DEVICE:
            return self.groups
        assert self.host is not None, "there is no host tier"
        return self.host.groups

    def siblings(self, seq_ids: Sequence[int], tier: Tier) -> list[SequenceBlocks]:
        """Return the block tables of sequences that are swapped out of a tier together."""
        if len(set(seq_ids)) != len(seq_ids):
            raise ValueError(f"seq_ids must be distinct, got {list(seq_ids)}")
        states = [self.sequences[seq_id] for seq_id in seq_ids]
        for seq_id, state in zip(seq_ids, states, strict=True):
            if state.is_swapped != (tier is Tier.HOST):
                raise ValueError(f"sequence {seq_id} is {'' if state.is_swapped else 'not '}swapped out")
            if state.num_slots != state.num_computed:
                raise ValueError(f"sequence {seq_id} has {state.num_slots - state.num_computed} unwritten slots")
        return states

    def _extend(self, state: SequenceBlocks, needs: Sequence[int]) -> None:
        """Add new blocks to the tables of a sequence; `needs` has their number for each group."""
        for idx, fresh in enumerate(needs):
            if fresh:
                block_ids = self.take(idx, fresh)
                table = state.tables[idx]
                state.mark_dirty(idx, len(table))
                table += block_ids
                self.version += 1

    def _apply_move(self, move: BlockCopy) -> None:
        """Replace the id of a block that moved within its tier."""
        if move.src_tier is Tier.DEVICE:
            self.pins.apply_move(move)
        for state in self.sequences.values():
            state.apply_move(move)

    def _shared(
        self, state: SequenceBlocks, members: Sequence[int], checkpoint: StateBackup | None = None
    ) -> list[int]:
        """Return the groups whose last block has another holder, or will have one as a state backup."""
        backup_ids = {} if checkpoint is None else checkpoint.block_ids
        tables, groups = state.tables, self.groups
        return [
            idx
            for idx in members
            if tables[idx] and (groups[idx].pool.ref_counts[tables[idx][-1]] > 1 or idx in backup_ids)
        ]

    def _used_in_part(self, state: SequenceBlocks, offset: int) -> list[int]:
        """Return the groups whose last block has no other holder, and is published with more tokens than `offset`."""
        group_idxs = []
        for idx in self.token_groups:
            pool, block_id = self.groups[idx].pool, state.tables[idx][-1]
            content = pool.index.content_of(block_id)
            if content is not None and pool.ref_counts[block_id] == 1 and offset * TOKEN_BYTES < len(content):
                group_idxs.append(idx)
        return group_idxs

    def _is_published(self, state: SequenceBlocks, group_idx: int) -> bool:
        table = state.tables[group_idx]
        return bool(table) and table[-1] in self.groups[group_idx].pool.index

    def _unpublish(self, state: SequenceBlocks, members: Sequence[int], copied: Sequence[int]) -> None:
        """Unpublish last blocks that are about to be written in place; blocks of `copied` groups stay published."""
        for idx in members:
            if idx not in copied and self._is_published(state, idx):
                self.groups[idx].pool.withdraw(state.tables[idx][-1])
                self.version += 1

    def _copy_on_write(self, state: SequenceBlocks, group_idx: int) -> None:
        """Replace the last entry of a table by a private copy of its block."""
        # Take before release: the target must not be the source. Once released, the source may be evicted and
        # overwritten by a later pending copy, or by the step; both run after this copy has read it.
        (new,) = self.take(group_idx, 1)
        table = state.tables[group_idx]
        old, table[-1] = table[-1], new
        pool = self.groups[group_idx].pool
        pool.release((old,))
        if pool.recent is not None:
            pool.recent.copied.append(new)
        state.mark_dirty(group_idx, len(table) - 1)
        self.pending_copies.append(BlockCopy(group_idx, old, new))
        self.num_copies += 1
        self.version += 1

    # ---- states ----

    def _move_state(self, state: SequenceBlocks, group_idx: int) -> None:
        """Pad a recurrent group's table with null entries, so that the state's block is the last entry again."""
        table = state.tables[group_idx]
        num_new = self.groups[group_idx].spec.num_blocks(state.num_slots) - len(table)
        if num_new:
            state.mark_dirty(group_idx, len(table) - 1)
            table[-1:-1] = [NULL_BLOCK] * num_new
            state.num_skipped[group_idx] += num_new

    def _checkpoint(self, state: SequenceBlocks) -> StateBackup:
        """Return a backup of the present states, whose reference counts `_hold` increments."""
        num_tokens = state.num_computed
        return StateBackup(
            num_tokens, {idx: state.tables[idx][-1] for idx in self.recurrent_groups} if num_tokens else {}
        )

    def _hold(self, state: SequenceBlocks, checkpoint: StateBackup) -> None:
        for idx, block_id in checkpoint.block_ids.items():
            self.groups[idx].pool.retain((block_id,))
        state.checkpoint = checkpoint

    def _restore_state(self, state: SequenceBlocks) -> None:
        """Replace the present states by the backup."""
        if state.checkpoint is None:
            return
        num_tokens, block_ids = state.checkpoint
        for idx in self.recurrent_groups:
            spec, pool, table = self.groups[idx].spec, self.groups[idx].pool, state.tables[idx]
            pool.release(table[-1:])
            num_skipped = max(0, spec.num_blocks(num_tokens) - 1)
            table[num_skipped:] = [block_ids[idx]] if idx in block_ids else []
            state.num_skipped[idx] = num_skipped
            state.mark_dirty(idx, num_skipped)
        state.checkpoint = None
