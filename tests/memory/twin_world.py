"""Compares the world with its twin: verdicts, blocks and their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.memory import AllocStatus, Verdict
from quire.memory.pool.idle_blocks import RetentionPriority
from tests.memory.host_world import compare_hosts
from tests.memory.twin_capacity import joint_peak, least_needed
from tests.memory.twin_pages import Match, Page

if TYPE_CHECKING:
    from tests.memory.world import World


def compare_verdict(world: World, status: AllocStatus, num_tokens: int, hit: Match, step: int, reserved: int) -> None:
    twin = world.twin
    groups = range(len(world.size.kinds))
    if joint_peak(twin, num_tokens) > twin.num_pages - twin.pin_limit:
        assert status.verdict is Verdict.NEVER, "NEVER was not said"
        assert status.needed > status.available
        return
    assert status.verdict is not Verdict.NEVER, "NEVER was said though it fits"
    num_swapped = 0 if twin.host is None else len(twin.host.tables)
    has_others = len(twin.sequences) > num_swapped
    spare = reserved if has_others else 0
    margin, is_exact = twin.num_available() - (world.size.watermark if has_others else 0), True
    for idx in groups:
        margin -= least_needed(twin, idx, num_tokens, hit.pages[idx], hit.num_tokens, step) + spare
        margin -= sum(page in twin.groups[idx].idle for page in hit.pages[idx])
        is_exact &= not hit.pages[idx] or world.size.kinds[idx].name in ("full", "state")
    # With a hit of a window the closed form may ask for more than is needed, never for less.
    assert status.available - status.needed <= margin
    assert status.available - status.needed == margin or not is_exact
    assert (status.verdict is Verdict.OK) == (status.needed <= status.available)


def goes_first(world: World, seq_id: int, group_idx: int, block_idx: int) -> bool:
    """Say whether the manager evicts the block that is published as a sequence's block first."""
    pool = world.manager.groups[group_idx].pool
    (block_id,) = pool.index.published(world.chains[seq_id], block_idx, block_idx + 1)
    return block_id in pool.idle.queues[RetentionPriority.LOW]


def compare_with_twin(world: World) -> None:
    manager, twin = world.manager, world.twin
    usage = manager.usage()
    groups = range(len(world.size.kinds))
    num_idle = sum(len(group.idle) for group in twin.groups)
    num_used = sum(map(twin.num_used, groups))
    num_free = len(groups) * world.size.num_blocks - num_used - num_idle
    real = (usage.used, usage.idle, usage.free, usage.num_copies, usage.num_merges, usage.num_evictions)
    counts = (num_used, num_idle, num_free, twin.num_copies, twin.num_merges, twin.num_evictions)
    assert real == counts, "the twin counts otherwise"
    assert manager.sequences.keys() == twin.sequences.keys()
    block_of: dict[Page, int] = {}
    for seq_id, sequence in twin.sequences.items():
        state = manager.sequences[seq_id]
        assert (state.num_slots, state.num_computed) == (sequence.num_slots, sequence.num_computed)
        limit = 0 if state.is_swapped else manager.rollback.limit(seq_id)
        assert limit == 0 or not twin.can_truncate(seq_id, limit - 1), "it could be rolled back further"
        assert manager.step_limit(seq_id, 20) == twin.step_limit(seq_id, 20), "the twin makes other steps"
        held = state.checkpoint and (state.checkpoint.num_tokens, state.checkpoint.block_ids.keys())
        assert held == (sequence.checkpoint and (sequence.checkpoint[0], sequence.checkpoint[1].keys()))
        for group_idx, page in (sequence.checkpoint[1] if sequence.checkpoint else {}).items():
            block_of[page] = state.checkpoint.block_ids[group_idx]  # type: ignore[union-attr]
        for group_idx, pages in enumerate(sequence.pages):
            table = manager.block_table(seq_id, group_idx)
            assert len(table) == len(pages)
            for one, block_id in zip(pages, table, strict=True):
                assert (one is None) == (block_id == 0), "the twin frees other blocks"
                if one is not None:
                    assert block_of.setdefault(one, block_id) == block_id, "shared otherwise than in the twin"
    for idx, (group, theirs) in enumerate(zip(manager.groups, twin.groups, strict=True)):
        for name, tables in twin.pins.items():
            pinned = [page for page in tables[idx] if page is not None]
            for page, block_id in zip(pinned, manager.pins.blocks_of(name, idx), strict=True):
                assert block_of.setdefault(page, block_id) == block_id, "pinned otherwise than in the twin"
        for page, block_id in zip(theirs.by_turn, group.pool.idle, strict=True):
            assert block_of.setdefault(page, block_id) == block_id, "evicted in another order than in the twin"
        published = set(group.pool.index.block_ids())
        assert published == {block_of[page] for page in theirs.published.values()}
        mine = [block_of[page] for page in block_of if page in theirs.idle or page in theirs.published.values()]
        assert len(set(mine)) == len(mine), "two pages of the twin are one block"
    if twin.host is not None:
        compare_hosts(world, twin.host, block_of)
    hints = [(idx, block_of[page]) for idx, page in twin.hints]
    assert list(manager.arena.retention.hints()) == hints, "the twin retains other blocks"
    for page, block_id in block_of.items():
        assert world.block_of.get(page, block_id) == block_id, "a page of the twin moved"
    world.block_of = block_of
