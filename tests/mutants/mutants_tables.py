"""Mutants of the block tables: copy on write, forks, publication, windows and recurrent states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from quire.memory import NO_OPS, KVCacheManager, RecurrentState, SlidingWindow, Tier
from quire.memory.groups.cache_group import CacheGroup
from quire.memory.pool.pool import NULL_BLOCK, BlockPool
from quire.memory.sequence_blocks import SequenceBlocks, StateBackup
from quire.memory.tables import append, publish
from quire.memory.tables.snapshots import Snapshots
from quire.memory.tables.tables import BlockTables
from tests.memory.checkers import (
    audited_run,
    beam_run,
    scheduler_run,
    small_world,
    state_world,
    walk_read_back,
    walk_reference,
    window_world,
)
from tests.mutants.table import Bug, Mutant, ignored, replaced


def write_tail_in_place(honest: Any, tables: BlockTables, state: SequenceBlocks, *args: Any, **options: Any) -> Any:
    was_private, state.tail_is_private = state.tail_is_private, True
    is_granted = honest(tables, state, *args, **options)
    state.tail_is_private = is_granted or was_private
    return is_granted


def lose_copies(_: Any, memory: KVCacheManager) -> Any:
    memory.tables.pending_copies = []
    return NO_OPS


def lose_copies_of_moves(honest: Any, tables: BlockTables, *args: Any) -> Any:
    before = list(tables.pending_copies)
    block_ids = honest(tables, *args)
    tables.pending_copies = before
    return block_ids


def keep_ids_on(tier: Tier) -> Bug:
    """Return the bug that moved blocks of a tier keep their old ids in the tables."""
    return lambda honest, state, move: None if move.src_tier is tier else honest(state, move)


def retain_twice(honest: Any, memory: KVCacheManager, parent_id: int, child_id: int, *args: Any) -> Any:
    chain = honest(memory, parent_id, child_id, *args)
    for idx, group in enumerate(memory.groups):
        group.pool.retain(memory.block_table(child_id, idx)[-1:])
    return chain


def publish_appended(honest: Any, memory: KVCacheManager, seq_ids: Sequence[int], *args: Any, **options: Any) -> Any:
    num_granted = honest(memory, seq_ids, *args, **options)
    for state in map(memory.sequences.__getitem__, seq_ids[:num_granted]):
        num_full = min(state.num_slots, len(state.chain.tokens)) // memory.block_size
        if num_full > state.num_published:
            publish.publish_blocks(memory.groups, state, num_full)
    return num_granted


def free_appended(honest: Any, memory: KVCacheManager, seq_ids: Sequence[int], *args: Any, **options: Any) -> Any:
    num_granted = honest(memory, seq_ids, *args, **options)
    for state in map(memory.sequences.__getitem__, seq_ids[:num_granted]):
        computed, state.num_computed = state.num_computed, state.num_slots
        for idx in memory.windowed_groups:
            publish.free_out_of_window(memory.groups[idx], state, idx)
        state.num_computed = computed
    return num_granted


def touch_refused(honest: Any, memory: KVCacheManager, seq_ids: Sequence[int], *args: Any, **options: Any) -> Any:
    num_granted = honest(memory, seq_ids, *args, **options)
    for seq_id in seq_ids[num_granted:]:
        memory.sequences[seq_id].dirty_from[0] = 0
    return num_granted


def merge_without(command: str) -> Bug:
    """Return the bug that merging calls a command of the pool in vain."""

    def publish_blocks(honest: Any, *args: Any) -> Any:
        with replaced(BlockPool, command):
            return honest(*args)

    return publish_blocks


def publish_after_reset(honest: Any, memory: KVCacheManager) -> None:
    honest(memory)
    for state in memory.sequences.values():
        state.is_publishing = True


def free_without_release(_: Any, group: CacheGroup, state: SequenceBlocks, group_idx: int) -> None:
    new = group.num_skipped(state.num_computed)
    state.tables[group_idx][:new] = [NULL_BLOCK] * new
    state.num_skipped[group_idx] = new
    state.mark_dirty(group_idx, 0)


def fork_without_skipped(honest: Any, state: SequenceBlocks, *args: Any) -> SequenceBlocks:
    child: SequenceBlocks = honest(state, *args)
    child.num_skipped = [0] * len(child.num_skipped)
    return child


def count_no_copies(honest: Any, tables: BlockTables, states: Sequence[SequenceBlocks]) -> list[int]:
    size = tables.groups[0].spec.block_size
    num_full = sum(state.num_slots % size == 0 for state in states)
    return [min(need, num_full) for need in honest(tables, states)]


def count_last_holder(honest: Any, tables: BlockTables, states: Sequence[SequenceBlocks]) -> list[int]:
    tails = Counter(state.tables[0][-1] for state in states if state.num_slots % tables.groups[0].spec.block_size)
    return [need + sum(count > 1 for count in tails.values()) for need in honest(tables, states)]


def write_published_state(honest: Any, *args: Any, **options: Any) -> Any:
    with replaced(BlockPool, "withdraw"):
        return honest(*args, **{**options, "may_copy_published": False})


def write_shared_state(honest: Any, tables: BlockTables, state: SequenceBlocks, *args: Any, **options: Any) -> Any:
    """Undo the copy of a state that still has other holders."""
    before = {idx: state.tables[idx][-1] for idx in tables.recurrent_groups if state.tables[idx]}
    is_granted = honest(tables, state, *args, **options)
    for idx, old in before.items():
        pool, new = tables.groups[idx].pool, state.tables[idx][-1]
        if new != old and pool.ref_counts[old]:
            pool.retain((old,))
            pool.release((new,))
            state.tables[idx][-1] = old
            tables.pending_copies = [copy for copy in tables.pending_copies if copy[:3] != (idx, old, new)]
    return is_granted


def grow_after_state(honest: Any, tables: BlockTables, state: SequenceBlocks, *args: Any, **options: Any) -> Any:
    """Leave the state at its old entry of a table that grows."""
    lengths = {idx: len(state.tables[idx]) for idx in tables.recurrent_groups if state.tables[idx]}
    is_granted = honest(tables, state, *args, **options)
    for idx, length in lengths.items():
        table = state.tables[idx]
        if len(table) > length:
            table[length - 1], table[-1] = table[-1], NULL_BLOCK
            state.num_skipped[idx] -= len(table) - length
    return is_granted


def publish_every_state(honest: Any, groups: Sequence[CacheGroup], state: SequenceBlocks, num_full: int) -> Any:
    num_merges = honest(groups, state, num_full)
    for idx, group in enumerate(groups):
        index = group.pool.index
        if group.spec.is_recurrent and index.tree.insert(state.chain, num_full, 0) == num_full:
            position = index.tree.match(state.chain, num_full).position(num_full - 1)
            if not index.at(position):
                index.put(position, state.tables[idx][-1])
    return num_merges


def release_backup(honest: Any, tables: BlockTables, state: SequenceBlocks, *args: Any, **options: Any) -> Any:
    before = state.checkpoint
    is_granted = honest(tables, state, *args, **options)
    if state.checkpoint is not before:
        for idx, block_id in state.checkpoint.block_ids.items():
            tables.groups[idx].pool.release((block_id,))
    return is_granted


def leak_backup(_: Any, __: BlockTables, state: SequenceBlocks) -> None:
    state.checkpoint = None


def restore_present_state(honest: Any, tables: BlockTables, state: SequenceBlocks, num_tokens: int) -> None:
    """Make the present state the backup before it is restored."""
    if state.checkpoint is not None and num_tokens < state.num_slots:
        length = state.checkpoint.num_tokens
        present = {idx: state.tables[idx][-1] for idx in tables.recurrent_groups}
        for idx, block_id in present.items():
            tables.groups[idx].pool.retain((block_id,))
        tables.drop_checkpoint(state)
        state.checkpoint = StateBackup(length, present)
    honest(tables, state, num_tokens)


def publish_at_one_priority(honest: Any, *args: Any) -> Any:
    with replaced(BlockPool, "set_priority"):
        return honest(*args)


BOTH = (walk_read_back, walk_reference)
ALL = (*BOTH, small_world, scheduler_run, audited_run)
STATE = (state_world, *BOTH)
TABLES = (
    Mutant("copy_on_write_skipped", BlockTables, "grow", write_tail_in_place, ALL),
    Mutant("copies_lost", KVCacheManager, "take_ops", lose_copies, ALL),
    Mutant("moved_blocks_not_copied", BlockTables, "take", lose_copies_of_moves, (walk_read_back,)),
    Mutant("moved_blocks_keep_old_ids", SequenceBlocks, "apply_move", keep_ids_on(Tier.DEVICE), (walk_read_back,)),
    Mutant("changed_entries_not_marked", SequenceBlocks, "mark_dirty", ignored, ALL),
    Mutant("refused_append_marks_entries", KVCacheManager, "append_slots", touch_refused, BOTH),
    Mutant("reference_leaked_on_fork", KVCacheManager, "fork", retain_twice, ALL),
    Mutant("published_before_computed", KVCacheManager, "append_slots", publish_appended, ALL),
    Mutant("duplicate_not_released", publish, "publish_blocks", merge_without("release"), ALL),
    Mutant("merged_block_not_retained", publish, "publish_blocks", merge_without("retain"), ALL),
    Mutant("rewritten_block_stays_published", BlockPool, "withdraw", ignored, (small_world, *BOTH)),
    Mutant("published_after_reset", KVCacheManager, "reset_prefix_cache", publish_after_reset, BOTH),
    # ---- beams ----
    Mutant("beam_copies_not_counted", append, "count_growth", count_no_copies, (beam_run,)),
    Mutant("beam_last_holder_counted", append, "count_growth", count_last_holder, (beam_run,)),
    # ---- windows ----
    Mutant(
        "window_one_token_short",
        SlidingWindow,
        "first_live_token",
        lambda _, spec, num_tokens: max(0, num_tokens - spec.window + 2),
        (*BOTH, window_world),
    ),
    Mutant("window_not_freed", publish, "free_out_of_window", ignored, (*BOTH, window_world, audited_run)),
    Mutant(
        "window_freed_without_release",
        publish,
        "free_out_of_window",
        free_without_release,
        (*BOTH, window_world, audited_run),
    ),
    Mutant(
        "window_freed_before_computed",
        KVCacheManager,
        "append_slots",
        free_appended,
        (*BOTH, window_world, scheduler_run),
    ),
    Mutant("fork_forgets_skipped_blocks", SequenceBlocks, "fork", fork_without_skipped, (*BOTH, window_world)),
    Mutant(
        "window_peak_without_step",
        SlidingWindow,
        "peak_blocks",
        lambda honest, spec, num_tokens, _: honest(spec, num_tokens, 1),
        (walk_reference, walk_read_back),
    ),
    # ---- recurrent states ----
    Mutant(
        "published_state_written_in_place",
        BlockTables,
        "grow",
        write_published_state,
        (*STATE, scheduler_run, audited_run),
    ),
    Mutant(
        "shared_state_written_in_place",
        BlockTables,
        "grow",
        write_shared_state,
        (*STATE, scheduler_run, audited_run),
    ),
    Mutant("state_left_behind", BlockTables, "grow", grow_after_state, (*STATE, scheduler_run, audited_run)),
    Mutant(
        "state_published_at_wrong_length",
        publish,
        "publish_blocks",
        publish_every_state,
        (*STATE, audited_run),
    ),
    Mutant(
        "snapshot_stepped_over", KVCacheManager, "step_limit", lambda *args: args[-1], (state_world, walk_reference)
    ),
    Mutant("state_backup_not_held", BlockTables, "grow", release_backup, STATE),
    Mutant("state_backup_leaked", BlockTables, "drop_checkpoint", leak_backup, STATE),
    Mutant("state_not_rolled_back", BlockTables, "shrink", restore_present_state, STATE),
    Mutant("older_snapshots_keep_priority", Snapshots, "publish", publish_at_one_priority, (walk_reference,)),
    Mutant(
        "missing_state_hit",
        RecurrentState,
        "longest_hit",
        lambda *args: args[-1],
        (scheduler_run, *BOTH, audited_run),
    ),
)
