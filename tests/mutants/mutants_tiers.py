"""Mutants of the tiers: swapping, demotion to the host, promotion, saves to disk and loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.memory import BlockCopy, KVCacheManager, PrefixHit, Tier
from quire.memory.capacity_queries import CapacityQueries
from quire.memory.pool.idle_blocks import RetentionPriority
from quire.memory.pool.pool import BlockPool
from quire.memory.prefix.published import PublishedBlocks
from quire.memory.sequence_blocks import SequenceBlocks
from quire.memory.tables.tables import BlockTables
from quire.memory.tiers import swap
from quire.memory.tiers.disk_tier import CombinedView, DiskSink, DiskTier
from tests.memory.checkers import disk_read_back, disk_reference, host_read_back, host_reference, host_world
from tests.mutants.mutants_tables import keep_ids_on
from tests.mutants.table import Bug, Mutant, ignored, replaced, returning


def is_between_tiers(copy: BlockCopy) -> bool:
    return copy.src_tier is not copy.dst_tier


def with_copies(change: Callable[[list[BlockCopy]], list[BlockCopy]]) -> Bug:
    """Return the bug that `apply_moves` changes the copies that it adds."""

    def apply_moves(honest: Any, tables: BlockTables) -> None:
        start = len(tables.pending_copies)
        honest(tables)
        tables.pending_copies[start:] = change(tables.pending_copies[start:])

    return apply_moves


def with_ops(change: Callable[[tuple[BlockCopy, ...]], Any]) -> Bug:
    """Return the bug that the copies of a step are changed when they are handed over."""

    def take_ops(honest: Any, memory: KVCacheManager) -> Any:
        ops = honest(memory)
        return ops._replace(copies=tuple(change(ops.copies)))

    return take_ops


def rotate_tables(honest: Any, tables: BlockTables, seq_ids: Any) -> None:
    honest(tables, seq_ids)
    for seq_id in seq_ids:
        for table in tables.sequences[seq_id].host_tables or ():
            table[:] = table[1:] + table[:1]


def transfer_alone(honest: Any, tables: BlockTables, states: Any, src: Tier, routes: Any) -> Any:
    """Give every sequence of a family copies of its own, where the device has room for them."""
    alone = [swap.find_routes(tables, [state], src) for state in states]
    needs = [sum(route[idx].num_needed for route in alone) for idx in range(len(routes))]
    if src is Tier.DEVICE or not tables.arena.fits(needs):
        return honest(tables, states, src, routes)
    return sum(honest(tables, [state], src, swap.find_routes(tables, [state], src)) for state in states)


def release_last_twice(honest: Any, tables: BlockTables, state: SequenceBlocks, src: Tier, *args: Any) -> None:
    last = [table[-1:] for table in state.tables_on(src)]
    honest(tables, state, src, *args)
    if src is Tier.HOST:
        tables.groups_on(src)[0].pool.release([block_id for block_id in last[0] if block_id])


def forget_host_tables(_: Any, __: BlockTables, state: SequenceBlocks, *___: Any) -> None:
    state.host_tables = None


def raise_low_priority(honest: Any, pool: BlockPool, block_ids: Any) -> Any:
    for block_id in block_ids:
        if block_id in pool.idle.queues[RetentionPriority.LOW]:
            pool.set_priority(block_id, RetentionPriority.DEFAULT)
    return honest(pool, block_ids)


def load_unpublished(honest: Any, tables: BlockTables, state: SequenceBlocks, loads: Any) -> None:
    honest(tables, state, loads)
    for load in loads:
        tables.groups[load.group_idx].pool.withdraw(state.tables[load.group_idx][load.block_idx])


def reset_device_only(honest: Any, pool: BlockPool) -> None:
    if pool.keeper is not None:  # the device's pools, from which the host keeps what is evicted
        honest(pool)


def allow_without_loads(honest: Any, queries: CapacityQueries, num_tokens: int, hit: PrefixHit, *args: Any) -> Any:
    return honest(queries, num_tokens, hit._replace(loads=()), *args)


def reverse_tickets(honest: Any, disk: DiskTier, chain: Any, num_blocks: int, fetched: Any) -> Any:
    tickets = [block.ticket for block in reversed(fetched)]
    mixed = [block._replace(ticket=ticket) for block, ticket in zip(fetched, tickets, strict=True)]
    return honest(disk, chain, num_blocks, mixed)[::-1]


def publish_held(honest: Any, *args: Any) -> Any:
    with replaced(BlockPool, "release"):
        return honest(*args)


def find_on_no_tier(honest: Any, *args: Any) -> Any:
    with replaced(PublishedBlocks, "holds", returning(False)):
        return honest(*args)


def export_unwritten(honest: Any, disk: DiskTier, *args: Any) -> Any:
    """Give blocks away, those among them that a copy is still to write."""
    tables = disk._tables
    pending, tables.pending_copies = tables.pending_copies, []
    try:
        return honest(disk, *args)
    finally:
        tables.pending_copies = pending


def export_permuted(honest: Any, *args: Any) -> Any:
    ops = honest(*args)
    return ops._replace(saves=ops.saves[::-1])


def export_heads_only(honest: Any, disk: DiskTier, chain: Any, num_blocks: int, wants: Any) -> Any:
    return honest(disk, chain, min(num_blocks, 1), wants)


HOST_BOTH = (host_read_back, host_reference)
HOST = (*HOST_BOTH, host_world)
DISK = (disk_read_back, disk_reference)
TIERS = (
    Mutant("swapped_table_permuted", swap, "swap_out", rotate_tables, HOST_BOTH),
    Mutant("swap_in_copies_shared_blocks", swap, "transfer", transfer_alone, HOST),
    Mutant("host_block_released_twice", swap, "release_tier", release_last_twice, HOST),
    Mutant("host_blocks_leaked", swap, "release_tier", forget_host_tables, HOST),
    Mutant("low_priority_demoted", BlockPool, "evict", raise_low_priority, (host_reference,)),
    Mutant(
        "host_duplicates_keep_priority",
        swap,
        "release_tier",
        lambda honest, tables, state, src, *_: honest(tables, state, src),
        (host_reference,),
    ),
    Mutant(
        "demoted_block_not_copied",
        BlockTables,
        "apply_moves",
        with_copies(lambda copies: [copy for copy in copies if not is_between_tiers(copy)]),
        HOST,
    ),
    Mutant(
        "demoted_after_reuse",
        BlockTables,
        "apply_moves",
        with_copies(lambda copies: sorted(copies, key=is_between_tiers)),
        (host_read_back,),
    ),
    Mutant("loaded_block_not_published", swap, "load_hit", load_unpublished, HOST_BOTH),
    Mutant("moved_host_blocks_keep_old_ids", SequenceBlocks, "apply_move", keep_ids_on(Tier.HOST), (host_read_back,)),
    Mutant("host_reset_skipped", BlockPool, "reset", reset_device_only, (host_reference,)),
    Mutant("admission_ignores_loads", CapacityQueries, "can_allocate", allow_without_loads, (host_reference,)),
    # ---- the disk ----
    Mutant("evicted_block_not_saved", DiskSink, "keep", ignored, (disk_reference,)),
    Mutant(
        "saved_after_reuse",
        KVCacheManager,
        "take_ops",
        with_ops(lambda copies: sorted(copies, key=lambda copy: copy.dst_tier is Tier.DISK)),
        DISK,
    ),
    Mutant(
        "loaded_bytes_not_copied",
        KVCacheManager,
        "take_ops",
        with_ops(lambda copies: (copy for copy in copies if copy.src_tier is not Tier.DISK)),
        DISK,
    ),
    Mutant("loaded_bytes_permuted", DiskTier, "publish_loaded", reverse_tickets, DISK),
    Mutant(
        "loads_evict_one_another",
        DiskTier,
        "publish_loaded",
        lambda honest, disk, chain, _, fetched: honest(disk, chain, 0, fetched),
        (disk_reference, disk_read_back),
    ),
    Mutant("loaded_blocks_not_released", DiskTier, "publish_loaded", publish_held, DISK),
    Mutant("tiers_ignored_by_loads", DiskTier, "find_loads", find_on_no_tier, DISK),
    # ---- other engines ----
    Mutant("unwritten_block_given_away", DiskTier, "exporting_ops", export_unwritten, DISK),
    Mutant("blocks_given_away_permuted", DiskTier, "exporting_ops", export_permuted, DISK),
    Mutant("tails_not_given_away", DiskTier, "exporting_ops", export_heads_only, (disk_reference,)),
    Mutant("tiers_ignored_by_questions", DiskTier, "find_missing", find_on_no_tier, (disk_reference,)),
    Mutant("nothing_asked_for", DiskTier, "find_missing", returning([]), (disk_reference,)),
    Mutant(
        "blocks_out_of_window_loaded",
        CombinedView,
        "loads",
        lambda honest, view, _, end: honest(view, 0, end),
        (disk_reference,),
    ),
)
