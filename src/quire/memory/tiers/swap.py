"""Swapping of sequences between the device and the host. A block that several sequences share is copied once.

```
 source       [ 3 ][ 7 ][ 4 ]      3 is published on the other tier as 5, which is shared
 destination  [ 5 ][ 1 ][ 2 ]      7 to 1 and 4 to 2 are copied, and published at the same positions
```
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from quire.memory.capacity.admission import check_fit, refuse_blocks
from quire.memory.pool.idle_blocks import RetentionPriority
from quire.memory.pool.pool import NULL_BLOCK, BlockPool
from quire.memory.results import AllocStatus, BlockCopy, BlockLoad, Tier, Verdict
from quire.memory.sequence_blocks import SequenceBlocks
from quire.memory.tables.publish import next_publish_at
from quire.memory.tables.tables import BlockTables

OTHER_TIER = {Tier.DEVICE: Tier.HOST, Tier.HOST: Tier.DEVICE}


class SwapSize(NamedTuple):
    """Size of the copies that swap the sequences of a request.

    Args:
        num_blocks: blocks of all groups.
        num_bytes: bytes of these blocks.
    """

    num_blocks: int
    num_bytes: int


class TransferPlan(NamedTuple):
    """The transfer of the blocks of one cache group to the other tier.

    Args:
        existing: source block id -> block of the other tier that is published at the same position.
        missing: block ids that must be copied, in the order of the block tables.
        num_woken: number of blocks of `existing` that are idle.
    """

    existing: dict[int, int]
    missing: list[int]
    num_woken: int

    @property
    def num_needed(self) -> int:
        """Number of blocks of the other tier that become used."""
        return self.num_woken + len(self.missing)


def find_routes(tables: BlockTables, states: Sequence[SequenceBlocks], src: Tier) -> list[TransferPlan]:
    """Return for each cache group the transfer of some sequences' blocks to the other tier."""
    groups = zip(tables.groups_on(src), tables.groups_on(OTHER_TIER[src]), strict=True)
    routes = []
    for idx, (src_group, dst_group) in enumerate(groups):
        block_ids = _distinct_blocks(states, src, idx)
        equals = {block_id: _find_equal(src_group.pool, dst_group.pool, block_id) for block_id in block_ids}
        existing = {block_id: equal for block_id, equal in equals.items() if equal is not None}
        missing = [block_id for block_id in block_ids if block_id not in existing]
        num_woken = [dst_group.pool.ref_counts[equal] for equal in existing.values()].count(0)
        routes.append(TransferPlan(existing, missing, num_woken))
    return routes


def measure_swap(tables: BlockTables, states: Sequence[SequenceBlocks], src: Tier) -> SwapSize:
    """Return the size of the copies that swapping sequences out of a tier would take."""
    if tables.host is None:
        return SwapSize(0, 0)
    counts = [len(route.missing) for route in find_routes(tables, states, src)]
    return SwapSize(sum(counts), sum(map(mul, counts, tables.arena.layout.block_bytes)))


def check_swap_out(tables: BlockTables, states: Sequence[SequenceBlocks]) -> AllocStatus:
    """Return whether the host has room for sequences that would be swapped out."""
    totals = [len(_distinct_blocks(states, Tier.DEVICE, idx)) for idx in range(len(tables.groups))]
    if tables.host is None:
        idx = totals.index(max(totals))
        return AllocStatus(Verdict.NEVER, idx, totals[idx], 0)
    arena = tables.host.arena
    routes = find_routes(tables, states, Tier.DEVICE)
    refusal = refuse_blocks(arena, totals, arena.layout.num_slabs)
    return refusal or check_fit(arena, [route.num_needed for route in routes], [route.num_woken for route in routes])


def check_swap_in(
    tables: BlockTables,
    states: Sequence[SequenceBlocks],
    num_tokens: Sequence[int],
    step_tokens: int | None,
    reserved: Sequence[int],
    num_kept_free: int,
    num_slabs: int,
) -> AllocStatus:
    """Return whether the device has room for sequences that are swapped in, and then grow."""
    routes = find_routes(tables, states, Tier.HOST)
    growth = [_growth(tables, states, idx, route, num_tokens, step_tokens) for idx, route in enumerate(routes)]
    totals = [len(route.existing) + len(route.missing) + more for route, more in zip(routes, growth, strict=True)]
    refusal = refuse_blocks(tables.arena, totals, num_slabs)
    if refusal is not None:
        return refusal
    needs = [route.num_needed + more + count for route, more, count in zip(routes, growth, reserved, strict=True)]
    return check_fit(tables.arena, needs, [route.num_woken for route in routes], num_kept_free)


def _growth(
    tables: BlockTables,
    states: Sequence[SequenceBlocks],
    group_idx: int,
    route: TransferPlan,
    num_tokens: Sequence[int],
    step_tokens: int | None,
) -> int:
    """Return the number of blocks of a group that sequences will need for growth after they are swapped in together."""
    group = tables.groups[group_idx]
    spec, ref_counts = group.spec, group.pool.ref_counts
    siblings = Counter(block_id for state in states for block_id in state.tables_on(Tier.HOST)[group_idx])
    # Other sequences hold some of the found blocks, which do not become free when the siblings release them.
    holders = (
        Counter({block_id: ref_counts[route.existing.get(block_id, NULL_BLOCK)] for block_id in siblings}) + siblings
    )
    growers: Counter[int] = Counter()
    num_blocks = 0
    for state, goal in zip(states, num_tokens, strict=True):
        if goal <= state.num_slots:
            continue
        table = state.tables_on(Tier.HOST)[group_idx]
        if spec.is_recurrent:
            # At any length, a sequence overwrites its only state.
            growers[table[-1] if table else NULL_BLOCK] += 1
            continue
        num_own = sum(block_id != NULL_BLOCK and holders[block_id] == 1 for block_id in table)
        peak = spec.peak_blocks(goal, step_tokens or goal)
        num_blocks += max(0, min(peak - num_own, spec.num_blocks(goal) - len(table)))
        if state.num_slots % spec.block_size:
            growers[table[-1]] += 1
    num_blocks += growers.pop(NULL_BLOCK, 0)
    # A write to a shared tail copies it, except for the last holder.
    return num_blocks + sum(count - (count == holders[block_id]) for block_id, count in growers.items())


def transfer(tables: BlockTables, states: Sequence[SequenceBlocks], src: Tier, routes: Sequence[TransferPlan]) -> int:
    """Move all blocks of some sequences to the other tier; shared blocks stay shared."""
    dst = OTHER_TIER[src]
    for state in states:
        lengths = [len(table) for table in state.tables_on(src)]
        blank = [[NULL_BLOCK] * length for length in lengths]
        if dst is Tier.HOST:
            state.host_tables = blank
        else:
            state.tables = blank
    # Found blocks of all groups are retained first, so that the allocations below cannot evict them.
    for idx, (route, group) in enumerate(zip(routes, tables.groups_on(dst), strict=True)):
        for state in states:
            table = state.tables_on(dst)[idx]
            for block_idx, block_id in enumerate(state.tables_on(src)[idx]):
                if block_id in route.existing:
                    table[block_idx] = route.existing[block_id]
                    group.pool.retain((table[block_idx],))
    num_copied = sum(copy_blocks(tables, states, src, idx) for idx in range(len(routes)))
    for state in states:
        release_tier(tables, state, src, _priority_left(src))
    return num_copied


def copy_blocks(tables: BlockTables, states: Sequence[SequenceBlocks], src: Tier, group_idx: int) -> int:
    """Copy the blocks of one group that have null entries in the other tier's block tables; return their number."""
    dst = OTHER_TIER[src]
    src_pool, dst_pool = tables.groups_on(src)[group_idx].pool, tables.groups_on(dst)[group_idx].pool

    def entries_to_copy() -> list[tuple[SequenceBlocks, int, int]]:
        return [
            (state, block_idx, src_id)
            for state in states
            for block_idx, (src_id, dst_id) in enumerate(
                zip(state.tables_on(src)[group_idx], state.tables_on(dst)[group_idx], strict=True)
            )
            if src_id != NULL_BLOCK and dst_id == NULL_BLOCK
        ]

    new_ids = iter(tables.take(group_idx, len({src_id for _, _, src_id in entries_to_copy()}), dst))
    copied_to: dict[int, int] = {}
    # The allocation may have moved source blocks, so their ids are read after it.
    for state, block_idx, src_id in entries_to_copy():
        if src_id in copied_to:
            dst_pool.retain((copied_to[src_id],))
        else:
            copied_to[src_id] = next(new_ids)
            tables.pending_copies.append(BlockCopy(group_idx, src_id, copied_to[src_id], src, dst))
            position = src_pool.index.position_of(src_id)
            if position is not None and dst_pool.index.at(position) == NULL_BLOCK:
                dst_pool.index.put(position, copied_to[src_id])
        state.tables_on(dst)[group_idx][block_idx] = copied_to[src_id]
    return len(copied_to)


def release_tier(
    tables: BlockTables,
    state: SequenceBlocks,
    src: Tier,
    priority: RetentionPriority = RetentionPriority.DEFAULT,
) -> None:
    """Release the blocks that a sequence holds in a tier, its tail first."""
    tables.release(state, src, priority)
    if src is Tier.HOST:
        state.host_tables = None
        for idx in range(len(state.tables)):
            state.mark_dirty(idx, 0)
    else:
        state.tables = [[] for _ in state.tables]
        state.dirty_from = [0] * len(state.tables)
        state.is_dirty = False
        # The next publish of this sequence takes the slow path, which raises: it is swapped out.
        state.next_publish_at = 0
    state.tail_is_private = False


def swap_out(tables: BlockTables, seq_ids: Sequence[int]) -> None:
    """See `KVCacheManager.swap_out`."""
    states = tables.siblings(seq_ids, Tier.DEVICE)
    status = check_swap_out(tables, states)
    if status.verdict is not Verdict.OK:
        raise ValueError(f"no room on the host: {status.needed} blocks needed, {status.available} available")
    assert tables.host is not None
    routes = find_routes(tables, states, Tier.DEVICE)
    tables.version += 1
    for state in states:
        tables.drop_checkpoint(state)
    tables.host.num_sequences += len(states)
    tables.host.traffic.num_swap_outs += transfer(tables, states, Tier.DEVICE, routes)
    if tables.observer is not None:
        tables.observer.swapped_out(seq_ids)


def swap_in(tables: BlockTables, seq_ids: Sequence[int], windowed_groups: Sequence[int]) -> None:
    """See `KVCacheManager.swap_in`."""
    states = tables.siblings(seq_ids, Tier.HOST)
    routes = find_routes(tables, states, Tier.HOST)
    require_room(tables, [route.num_woken for route in routes], [len(route.missing) for route in routes])
    assert tables.host is not None
    tables.version += 1
    tables.host.num_sequences -= len(states)
    tables.host.traffic.num_swap_ins += transfer(tables, states, Tier.HOST, routes)
    for state in states:
        state.next_publish_at = next_publish_at(tables.groups, windowed_groups, state)
    if tables.observer is not None:
        tables.observer.swapped_in(seq_ids)


def load_hit(tables: BlockTables, state: SequenceBlocks, loads: Sequence[BlockLoad]) -> None:
    """Copy the host blocks of a new sequence's hit to the device, and publish them there."""
    assert tables.host is not None
    # All are retained first: demotions caused by the device's allocations must not evict them from the host.
    state.host_tables = [[NULL_BLOCK] * len(table) for table in state.tables]
    for load in loads:
        state.host_tables[load.group_idx][load.block_idx] = load.host_id
        tables.host.groups[load.group_idx].pool.retain((load.host_id,))
    for idx in range(len(state.tables)):
        tables.host.traffic.num_promotions += copy_blocks(tables, (state,), Tier.HOST, idx)
    release_tier(tables, state, Tier.HOST, _priority_left(Tier.HOST))


def _priority_left(src: Tier) -> RetentionPriority:
    """Return the retention priority of published blocks of a tier that now have copies on the other tier.

    The host's blocks are evicted first, since the device also has them; when the device evicts them, they are copied
    back only if the host has evicted them. So the two tiers together hold more distinct blocks.
    """
    return RetentionPriority.LOW if src is Tier.HOST else RetentionPriority.DEFAULT


def require_room(tables: BlockTables, woken: Sequence[int], missing: Sequence[int]) -> None:
    """Raise ValueError unless `woken` idle blocks and `missing` other blocks of each group can have holders at once."""
    needs = [one + other for one, other in zip(woken, missing, strict=True)]
    status = check_fit(tables.arena, needs, woken)
    if status.verdict is not Verdict.OK:
        raise ValueError(f"no room on the device: {status.needed} blocks needed, {status.available} available")


def _distinct_blocks(states: Sequence[SequenceBlocks], tier: Tier, group_idx: int) -> list[int]:
    """Return the distinct blocks of a group that some sequences hold in a tier, in the order of their tables."""
    block_ids = dict.fromkeys(block_id for state in states for block_id in state.tables_on(tier)[group_idx])
    block_ids.pop(NULL_BLOCK, None)
    return list(block_ids)


def _find_equal(src_pool: BlockPool, dst_pool: BlockPool, block_id: int) -> int | None:
    """Return the block of another pool that is published at the same position."""
    position = src_pool.index.position_of(block_id)
    return None if position is None else dst_pool.index.at(position) or None
