"""Mutants of the pools: slabs, eviction, retention hints and pins."""

from __future__ import annotations

from typing import Any

from quire.memory import KVCacheManager, Tier
from quire.memory.pins import Pins
from quire.memory.pool.arena import Arena
from quire.memory.pool.idle_blocks import IdleBlocks, RetentionPriority
from quire.memory.pool.multi_block_slabs import MultiBlockSlabs
from quire.memory.pool.pool import BlockPool
from quire.memory.pool.retention import Retention
from quire.memory.pool.single_block_slabs import SingleBlockSlabs
from quire.memory.pool.slab_layout import SlabLayout
from quire.memory.sequence_blocks import SequenceBlocks
from quire.memory.tables import publish
from quire.memory.tables.tables import BlockTables
from tests.memory.checkers import audited_run, hinted_world, scheduler_run, small_world, walk_read_back, walk_reference
from tests.mutants.table import Mutant, Seam, ignored, returning


def free_twice(honest: Any, memory: KVCacheManager, seq_id: int, **options: Any) -> None:
    table = memory.block_table(seq_id)
    honest(memory, seq_id, **options)
    memory.groups[0].pool.release(table[-1:])


def list_slab_twice(honest: Any, arena: Arena, *args: Any) -> None:
    honest(arena, *args)
    arena.free_slabs += arena.free_slabs[-1:]


def keep_first_slab(honest: Any, group: Any, slabs: list[int]) -> None:
    if len(slabs) > 1:
        honest(group, slabs[1:])


def start_a_block_early(honest: Any, layout: SlabLayout, idx: int, slabs: Any) -> list[int]:
    return [block_id - idx for block_id in honest(layout, idx, slabs)]


def need_one_less(honest: Any, arena: Arena, needs: list[int]) -> bool:
    return bool(honest(arena, [max(0, need - 1) for need in needs]))


def count_one_more(honest: Any, arena: Arena, *args: Any) -> list[int]:
    return [room + 1 for room in honest(arena, *args)]


def drop_idle_blocks(_: Any, pool: BlockPool) -> None:
    pool.idle.remove(list(pool.idle))
    pool.index.clear()


def release_without_priority(honest: Any, pool: BlockPool, ids: Any, _: Any = None, moments: Any = None) -> None:
    honest(pool, ids, moments=moments)


def release_group_by_group(
    _: Any, tables: BlockTables, state: SequenceBlocks, tier: Tier = Tier.DEVICE, *args: Any
) -> None:
    for group, table in zip(tables.groups_on(tier), state.tables_on(tier), strict=True):
        group.pool.release([block_id for block_id in reversed(table) if block_id], *args)
    if tier is Tier.DEVICE:
        tables.drop_checkpoint(state)


def evict_high_before_default(_: Any, idle: IdleBlocks, count: int) -> list[int]:
    low, default, high = idle.queues
    return [*low, *high, *default][:count]


def queue_high_as_default(honest: Any, idle: IdleBlocks, *args: Any) -> Any:
    parts = honest(idle, *args)
    for part in parts:
        if part.priority is RetentionPriority.HIGH:
            idle.queues[RetentionPriority.HIGH].discard(part.block_ids)
            idle.queues[RetentionPriority.DEFAULT].add(part.block_ids, part.moments)
    return [part._replace(priority=min(part.priority, RetentionPriority.DEFAULT)) for part in parts]


def keep_age_of_hint(honest: Any, retention: Retention, group_idx: int, block_id: int) -> Any:
    return [] if block_id in retention.of_group[group_idx] else honest(retention, group_idx, block_id)


def release_pinned(honest: Any, memory: KVCacheManager, name: str, *args: Any) -> Any:
    num_tokens = honest(memory, name, *args)
    for idx, group in enumerate(memory.groups if num_tokens else ()):
        group.pool.release(memory.pins.blocks_of(name, idx))
    return num_tokens


BOTH = (walk_read_back, walk_reference)
POOL = (
    Mutant(
        "block_released_twice",
        KVCacheManager,
        "free",
        free_twice,
        (*BOTH, small_world, scheduler_run, audited_run),
    ),
    Mutant(
        "prefix_evicted_head_first",
        BlockPool,
        "release",
        lambda honest, pool, block_ids, *args: honest(pool, sorted(block_ids), *args),
        (walk_reference,),
    ),
    Mutant("slab_listed_free_twice", Arena, "reclaim", list_slab_twice, (*BOTH, audited_run)),
    Mutant(
        "empty_slab_not_returned",
        SingleBlockSlabs,
        "return_slabs",
        keep_first_slab,
        (*BOTH, audited_run),
        more=(Seam(MultiBlockSlabs, "return_slabs", keep_first_slab),),
    ),
    Mutant("slab_views_overlap", SlabLayout, "first_blocks", start_a_block_early, (walk_read_back,)),
    Mutant(
        "capacity_overstated_by_one",
        Arena,
        "fits",
        need_one_less,
        (*BOTH, scheduler_run, audited_run),
        more=(Seam(Arena, "available_blocks", count_one_more),),
    ),
    Mutant("pool_reset_skipped", BlockPool, "reset", ignored, (walk_reference,)),
    Mutant("idle_blocks_lost_at_reset", BlockPool, "reset", drop_idle_blocks, BOTH),
    Mutant("low_priority_ignored", BlockPool, "release", release_without_priority, (walk_reference,)),
    Mutant("released_group_by_group", BlockTables, "release", release_group_by_group, (walk_reference,)),
    Mutant("window_not_retained_for_next_turn", publish, "retain_for_next_turn", ignored, (walk_reference,)),
    Mutant(
        "retained_blocks_evicted_early",
        IdleBlocks,
        "victims",
        evict_high_before_default,
        (walk_reference, hinted_world),
    ),
    Mutant("retention_hint_ignored", IdleBlocks, "add", queue_high_as_default, (walk_reference, walk_read_back)),
    Mutant("retention_unlimited", Retention, "limit_bytes", returning(1 << 60), (walk_reference, hinted_world)),
    Mutant("hint_kept_after_eviction", IdleBlocks, "forget", ignored, (walk_reference, walk_read_back, hinted_world)),
    Mutant("renewed_hint_keeps_its_age", Retention, "add", keep_age_of_hint, (walk_reference,)),
    Mutant("pinned_blocks_not_held", KVCacheManager, "pin", release_pinned, (hinted_world, *BOTH)),
    Mutant("pin_limit_ignored", Pins, "can_add", returning(True), (walk_reference,)),
    Mutant("pins_kept_at_reset", Pins, "clear", ignored, (hinted_world, walk_reference)),
)
