"""Progress of a sequence: full blocks are published, blocks out of the window are freed."""

from __future__ import annotations

from collections.abc import Sequence

from quire.memory.groups.cache_group import CacheGroup
from quire.memory.pool.idle_blocks import RetentionPriority
from quire.memory.pool.pool import NULL_BLOCK
from quire.memory.sequence_blocks import SequenceBlocks
from quire.memory.specs import NEVER_FREED


def next_publish_at(groups: Sequence[CacheGroup], windowed_groups: Sequence[int], state: SequenceBlocks) -> int:
    """Return the minimum number of computed tokens at which a block is published or freed."""
    event = NEVER_FREED
    if state.is_publishing:
        event = (state.num_published + 1) * groups[0].spec.block_size
    for idx in windowed_groups:
        event = min(event, groups[idx].spec.freed_after(state.num_skipped[idx]))
    return event


def publish_blocks(groups: Sequence[CacheGroup], state: SequenceBlocks, num_full: int) -> int:
    """Publish the blocks `[num_published, num_full)` of a sequence, or merge them with published duplicates.

    Recurrent groups are skipped; they publish snapshots only. If all groups are recurrent, no positions are added to
    the tree here: a position without any published block would never be trimmed. After a digest collision the sequence
    stops publishing, since its later blocks would have no positions in the tree.
    """
    start, chain, tree = state.num_published, state.chain, groups[0].pool.index.tree
    if groups[0].is_recurrent and all(group.is_recurrent for group in groups):
        state.num_published = num_full
        return 0
    cursor = tree.match(chain, num_full)
    num_known = cursor.num_known
    state.num_published = end = num_full if num_known >= num_full else tree.extend(cursor, chain, num_full, start)
    state.is_publishing = end == num_full
    num_merges, first = 0, max(start, num_known)
    ranges = cursor.ranges(first, end)
    for idx, group in enumerate(groups):
        if not group.is_recurrent:
            if start < num_known:
                num_merges += _publish_or_merge(group, state, idx, start, min(num_known, end))
            if ranges:
                group.pool.index.put_ranges(ranges, state.tables[idx][first:end])
    return num_merges


def _publish_or_merge(group: CacheGroup, state: SequenceBlocks, group_idx: int, start: int, end: int) -> int:
    """Publish blocks one by one in a group that may already have published the same tokens."""
    index, table = group.pool.index, state.tables[group_idx]
    num_merges = 0
    for block_idx, published_id in enumerate(index.published(state.chain, start, end), start):
        if published_id == NULL_BLOCK:
            index.put(index.tree.match(state.chain, end).position(block_idx), table[block_idx])
        else:
            merge(group, state, group_idx, block_idx, published_id)
            num_merges += 1
    return num_merges


def merge(group: CacheGroup, state: SequenceBlocks, group_idx: int, block_idx: int, published_id: int) -> None:
    """Replace a duplicate in a block table by the published block, and release the duplicate."""
    table = state.tables[group_idx]
    group.pool.retain((published_id,))
    group.pool.release((table[block_idx],))
    if group.pool.recent is not None:
        group.pool.recent.merged.append(published_id)
    table[block_idx] = published_id
    state.mark_dirty(group_idx, block_idx)


def retain_for_next_turn(group: CacheGroup, state: SequenceBlocks) -> None:
    """Restore the default priority of out-of-window blocks that a hit on the sequence's whole blocks would read."""
    pool, size = group.pool, group.spec.block_size
    num_full = max(0, state.num_computed - 1) // size
    first, last = group.num_skipped(num_full * size), min(num_full, group.num_skipped(state.num_computed))
    if first < last:
        for block_id in pool.index.published(state.chain, first, last):
            if block_id in pool.idle.queues[RetentionPriority.LOW]:
                pool.set_priority(block_id, RetentionPriority.DEFAULT)


def free_out_of_window(group: CacheGroup, state: SequenceBlocks, group_idx: int) -> None:
    """Release the blocks of a group that left the window, and replace them by null blocks.

    They are evicted before the blocks of ended sequences, since the next turn of a conversation reads none of them.
    Blocks in the window at the end of the prompt, or at a known branch point of prompts, have the default priority: the
    next prompt may continue there.
    """
    table = state.tables[group_idx]
    old, new = state.num_skipped[group_idx], group.num_skipped(state.num_computed)
    if old < new:
        low, default = table[old:new], list[int]()
        for first, last in _read_at_branch_points(group, state, old, new):
            default += filter(None, low[first - old : last - old])
            low[first - old : last - old] = [NULL_BLOCK] * (last - first)
        if default:
            group.pool.release(default)
            low = list(filter(None, low))
        group.pool.release(low, RetentionPriority.LOW)
        table[old:new] = [NULL_BLOCK] * (new - old)
        state.num_skipped[group_idx] = new
        state.mark_dirty(group_idx, old)


def _read_at_branch_points(group: CacheGroup, state: SequenceBlocks, start: int, end: int) -> list[tuple[int, int]]:
    """Return runs of a sequence's blocks `[start, end)` that hits at branch points or the end of the prompt read."""
    size, runs = group.spec.block_size, []
    partings = group.pool.index.tree.partings(state.chain, start + 1, state.num_published)
    for num_blocks in sorted((*state.branch_points, *partings)):
        if num_blocks > start:
            first, last = max(start, group.num_skipped(num_blocks * size)), min(end, num_blocks)
            if first < last:
                runs.append((first, last))
    return runs
