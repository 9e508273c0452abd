"""Sequences on their way from one tier to the other: each block moves once, however many of them hold it.

```
 from   [ 3 ][ 7 ][ 4 ]      3 is published on the other tier as 5: taken from there
 to     [ 5 ][ 1 ][ 2 ]      7 > 1 and 4 > 2 are copied, and published where 7 and 4 were
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
    """What must be copied to swap a family.

    Args:
        num_blocks: blocks of all groups.
        num_bytes: their bytes.
    """

    num_blocks: int
    num_bytes: int


class TransferPlan(NamedTuple):
    """How the blocks of one group get to the other tier.

    Args:
        found: by id, the block of the other tier that is published as its equal.
        missing: the others, in the order in which they are met.
        num_woken: blocks of `found` that are idle.
    """

    found: dict[int, int]
    missing: list[int]
    num_woken: int

    @property
    def num_needed(self) -> int:
        """Blocks of the other tier that will have holders and have none now."""
        return self.num_woken + len(self.missing)


def find_routes(tables: BlockTables, states: Sequence[SequenceBlocks], src: Tier) -> list[TransferPlan]:
    """Say for each group how the blocks of some sequences would leave a tier."""
    groups = zip(tables.groups_on(src), tables.groups_on(OTHER_TIER[src]), strict=True)
    routes = []
    for idx, (here, there) in enumerate(groups):
        block_ids = _distinct_blocks(states, src, idx)
        equals = {block_id: _find_equal(here.pool, there.pool, block_id) for block_id in block_ids}
        found = {block_id: equal for block_id, equal in equals.items() if equal is not None}
        missing = [block_id for block_id in block_ids if block_id not in found]
        num_woken = [there.pool.ref_counts[equal] for equal in found.values()].count(0)
        routes.append(TransferPlan(found, missing, num_woken))
    return routes


def measure_swap(tables: BlockTables, states: Sequence[SequenceBlocks], src: Tier) -> SwapSize:
    """Return what would be copied if some sequences left a tier."""
    if tables.host is None:
        return SwapSize(0, 0)
    counts = [len(route.missing) for route in find_routes(tables, states, src)]
    return SwapSize(sum(counts), sum(map(mul, counts, tables.arena.layout.block_bytes)))


def check_swap_out(tables: BlockTables, states: Sequence[SequenceBlocks]) -> AllocStatus:
    """Say whether the host has room for sequences that would go there."""
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
    """Say whether the device has room for sequences that come back, and then grow.

    Args:
        tables: of all sequences.
        states: those that would come back.
        num_tokens: the length that each would reach.
        step_tokens: the most tokens that will be appended to one at once, None for all.
        reserved: blocks of each group that others will ask for.
        num_kept_free: slabs that must stay free.
        num_slabs: slabs that a family alone can count on.
    """
    routes = find_routes(tables, states, Tier.HOST)
    growth = [_growth(tables, states, idx, route, num_tokens, step_tokens) for idx, route in enumerate(routes)]
    totals = [len(route.found) + len(route.missing) + more for route, more in zip(routes, growth, strict=True)]
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
    """Return the blocks of a group that a family will ask for after it has come back."""
    group = tables.groups[group_idx]
    spec, ref_counts = group.spec, group.pool.ref_counts
    siblings = Counter(block_id for state in states for block_id in state.tables_on(Tier.HOST)[group_idx])
    # Others hold some of what is found: it does not become free when the family no longer reads it.
    holders = Counter({block_id: ref_counts[route.found.get(block_id, NULL_BLOCK)] for block_id in siblings}) + siblings
    growers: Counter[int] = Counter()
    num_blocks = 0
    for state, goal in zip(states, num_tokens, strict=True):
        if goal <= state.num_slots:
            continue
        table = state.tables_on(Tier.HOST)[group_idx]
        if spec.is_recurrent:
            # Whatever it is to reach, it writes the one state that it has.
            growers[table[-1] if table else NULL_BLOCK] += 1
            continue
        num_own = sum(block_id != NULL_BLOCK and holders[block_id] == 1 for block_id in table)
        peak = spec.peak_blocks(goal, step_tokens or goal)
        num_blocks += max(0, min(peak - num_own, spec.num_blocks(goal) - len(table)))
        if state.num_slots % spec.block_size:
            growers[table[-1]] += 1
    num_blocks += growers.pop(NULL_BLOCK, 0)
    # Who writes to a shared tail gets a copy, but for its last holder.
    return num_blocks + sum(count - (count == holders[block_id]) for block_id, count in growers.items())


def transfer(tables: BlockTables, states: Sequence[SequenceBlocks], src: Tier, routes: Sequence[TransferPlan]) -> int:
    """Move all blocks of some sequences to the other tier, their sharing with them.

    Args:
        tables: of all sequences; the movements are added to its `pending_copies`.
        states: the sequences; the other tier has room for them.
        src: where they are.
        routes: see `find_routes`.

    Returns:
        The blocks that are copied.
    """
    dst = OTHER_TIER[src]
    for state in states:
        lengths = [len(table) for table in state.tables_on(src)]
        blank = [[NULL_BLOCK] * length for length in lengths]
        if dst is Tier.HOST:
            state.host_tables = blank
        else:
            state.tables = blank
    # What is there already is held first, in all groups: nothing that is taken then may evict it.
    for idx, (route, group) in enumerate(zip(routes, tables.groups_on(dst), strict=True)):
        for state in states:
            table = state.tables_on(dst)[idx]
            for block_idx, block_id in enumerate(state.tables_on(src)[idx]):
                if block_id in route.found:
                    table[block_idx] = route.found[block_id]
                    group.pool.retain((table[block_idx],))
    num_copied = sum(copy_blocks(tables, states, src, idx) for idx in range(len(routes)))
    for state in states:
        leave(tables, state, src, _priority_left(src))
    return num_copied


def copy_blocks(tables: BlockTables, states: Sequence[SequenceBlocks], src: Tier, group_idx: int) -> int:
    """Copy those blocks of one group to the other tier for which the tables there have null entries.

    Returns:
        The blocks that are copied.
    """
    dst = OTHER_TIER[src]
    here, there = tables.groups_on(src)[group_idx].pool, tables.groups_on(dst)[group_idx].pool

    def places() -> list[tuple[SequenceBlocks, int, int]]:
        return [
            (state, block_idx, src_id)
            for state in states
            for block_idx, (src_id, dst_id) in enumerate(
                zip(state.tables_on(src)[group_idx], state.tables_on(dst)[group_idx], strict=True)
            )
            if src_id != NULL_BLOCK and dst_id == NULL_BLOCK
        ]

    new_ids = iter(tables.take(group_idx, len({src_id for _, _, src_id in places()}), dst))
    recurrent_groups: dict[int, int] = {}
    # To take blocks may have moved those that are left: only now their ids are what will be read.
    for state, block_idx, src_id in places():
        if src_id in recurrent_groups:
            there.retain((recurrent_groups[src_id],))
        else:
            recurrent_groups[src_id] = next(new_ids)
            tables.pending_copies.append(BlockCopy(group_idx, src_id, recurrent_groups[src_id], src, dst))
            place = here.index.position_of(src_id)
            if place is not None and there.index.at(place) == NULL_BLOCK:
                there.index.put(place, recurrent_groups[src_id])
        state.tables_on(dst)[group_idx][block_idx] = recurrent_groups[src_id]
    return len(recurrent_groups)


def leave(
    tables: BlockTables,
    state: SequenceBlocks,
    src: Tier,
    priority: RetentionPriority = RetentionPriority.DEFAULT,
) -> None:
    """Release what a sequence holds in a tier, the tail before the head."""
    tables.release(state, src, priority)
    if src is Tier.HOST:
        state.host_tables = None
        for idx in range(len(state.tables)):
            state.mark_dirty(idx, 0)
    else:
        state.tables = [[] for _ in state.tables]
        state.dirty_from = [0] * len(state.tables)
        state.is_dirty = False
        # Whoever tries to publish more looks closely, and is refused.
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
    """Copy what a new sequence hit on the host to the device, and publish it there."""
    assert tables.host is not None
    # Held at once, so that what must leave the device for them does not take their place on the host.
    state.host_tables = [[NULL_BLOCK] * len(table) for table in state.tables]
    for load in loads:
        state.host_tables[load.group_idx][load.block_idx] = load.host_id
        tables.host.groups[load.group_idx].pool.retain((load.host_id,))
    for idx in range(len(state.tables)):
        tables.host.traffic.num_promotions += copy_blocks(tables, (state,), Tier.HOST, idx)
    leave(tables, state, Tier.HOST, _priority_left(Tier.HOST))


def _priority_left(src: Tier) -> RetentionPriority:
    """Return the retention priority of published blocks in a tier that were copied to the other.

    The host's are evicted first: the device has them too, and copies them back only if they are gone when it evicts
    them. So both tiers together hold more than one of them does.
    """
    return RetentionPriority.LOW if src is Tier.HOST else RetentionPriority.DEFAULT


def require_room(tables: BlockTables, woken: Sequence[int], missing: Sequence[int]) -> None:
    """Raise ValueError unless so many idle blocks of each group, and so many others, can all have holders."""
    needs = [one + other for one, other in zip(woken, missing, strict=True)]
    status = check_fit(tables.arena, needs, woken)
    if status.verdict is not Verdict.OK:
        raise ValueError(f"no room on the device: {status.needed} blocks needed, {status.available} available")


def _distinct_blocks(states: Sequence[SequenceBlocks], tier: Tier, group_idx: int) -> list[int]:
    """Return the blocks of a group that some sequences hold in a tier, each once, as they are met."""
    block_ids = dict.fromkeys(block_id for state in states for block_id in state.tables_on(tier)[group_idx])
    block_ids.pop(NULL_BLOCK, None)
    return list(block_ids)


def _find_equal(here: BlockPool, there: BlockPool, block_id: int) -> int | None:
    """Return the block of another pool that is published at the same place."""
    place = here.index.position_of(block_id)
    return None if place is None else there.index.at(place) or None
