"""What happens as a sequence is computed: blocks fill and are published, and blocks die."""

from __future__ import annotations

from collections.abc import Sequence

from quire.memory.groups.cache_group import CacheGroup
from quire.memory.pool.idle_blocks import RetentionPriority
from quire.memory.pool.pool import NULL_BLOCK
from quire.memory.sequence_blocks import SequenceBlocks
from quire.memory.specs import NEVER_FREED


def next_publish_at(groups: Sequence[CacheGroup], windowed_groups: Sequence[int], state: SequenceBlocks) -> int:
    """Return the least number of computed tokens at which there is more to do than to count.

    Args:
        groups: all cache groups, with one block size.
        mortal: which of them have blocks that die.
        state: of the sequence.
    """
    event = NEVER_FREED
    if state.is_publishing:
        event = (state.num_published + 1) * groups[0].spec.block_size
    for idx in windowed_groups:
        event = min(event, groups[idx].spec.freed_after(state.num_skipped[idx]))
    return event


def publish_blocks(groups: Sequence[CacheGroup], state: SequenceBlocks, num_full: int) -> int:
    """Publish the blocks `[num_published, num_full)` of a sequence, or merge them with their equals.

    Groups of states publish snapshots only, and are left out. Where all groups are states, the tree gets no positions
    here: a position where no block is ever published is never trimmed. After a digest collision the sequence publishes
    no more: its later blocks would have no positions.

    Returns:
        The duplicates that were given back.
    """
    start, chain, tree = state.num_published, state.chain, groups[0].pool.index.tree
    if all(group.is_recurrent for group in groups):
        state.num_published = num_full
        return 0
    known = tree.match(chain, num_full).num_known
    state.num_published = end = tree.insert(chain, num_full, start)
    state.is_publishing = end == num_full
    num_merges, first = 0, max(start, known)
    ranges = list(tree.match(chain, end).ranges(first, end))
    for idx, group in enumerate(groups):
        if not group.is_recurrent:
            if start < known:
                num_merges += _publish_or_merge(group, state, idx, start, min(known, end))
            if ranges:
                group.pool.index.put_ranges(ranges, state.tables[idx][first:end])
    return num_merges


def _publish_or_merge(group: CacheGroup, state: SequenceBlocks, group_idx: int, start: int, end: int) -> int:
    """Publish blocks one by one in a group that may have their equals.

    Returns:
        The duplicates that were given back.
    """
    index, table = group.pool.index, state.tables[group_idx]
    num_merges = 0
    for block_idx, known in enumerate(index.published(state.chain, start, end), start):
        if known == NULL_BLOCK:
            index.put(index.tree.match(state.chain, end).position(block_idx), table[block_idx])
        else:
            merge(group, state, group_idx, block_idx, known)
            num_merges += 1
    return num_merges


def merge(group: CacheGroup, state: SequenceBlocks, group_idx: int, block_idx: int, known: int) -> None:
    """Let a table take a published block in place of its own equal one, and give that back."""
    table = state.tables[group_idx]
    group.pool.retain((known,))
    group.pool.release((table[block_idx],))
    table[block_idx] = known
    state.mark_dirty(group_idx, block_idx)


def keep_for_next_turn(group: CacheGroup, state: SequenceBlocks) -> None:
    """Keep like others what of a group has died since the last whole block: a hit of whole blocks reads it.

    Args:
        group: a cache group whose blocks die.
        state: of a sequence that ends.
    """
    pool, size = group.pool, group.spec.block_size
    num_full = max(0, state.num_computed - 1) // size
    first, last = group.num_skipped(num_full * size), min(num_full, group.num_skipped(state.num_computed))
    if first < last:
        for block_id in pool.index.published(state.chain, first, last):
            if block_id in pool.idle.queues[RetentionPriority.LOW]:
                pool.set_priority(block_id, RetentionPriority.DEFAULT)


def free_out_of_window(group: CacheGroup, state: SequenceBlocks, group_idx: int) -> None:
    """Give the blocks of a group back that have died, and put null entries in their place.

    They are evicted before all that sequences left when they ended: the next turn of a conversation reads none of them.
    But those which are read where the prompt ends, and where prompts are known to part, are kept like others: the next
    prompt may go on from there.
    """
    table = state.tables[group_idx]
    old, new = state.num_skipped[group_idx], group.num_skipped(state.num_computed)
    if old < new:
        low, kept = table[old:new], list[int]()
        for first, last in _read_at_kept_places(group, state, old, new):
            kept += filter(None, low[first - old : last - old])
            low[first - old : last - old] = [NULL_BLOCK] * (last - first)
        if kept:
            group.pool.release(kept)
            low = list(filter(None, low))
        group.pool.release(low, RetentionPriority.LOW)
        table[old:new] = [NULL_BLOCK] * (new - old)
        state.num_skipped[group_idx] = new
        state.mark_dirty(group_idx, old)


def _read_at_kept_places(group: CacheGroup, state: SequenceBlocks, start: int, end: int) -> list[tuple[int, int]]:
    """Return runs of a sequence's blocks `[start, end)` that are read where the next prompt may go on or part."""
    size, runs = group.spec.block_size, []
    partings = group.pool.index.tree.partings(state.chain, start + 1, state.num_published)
    for place in sorted((*state.kept_places, *partings)):
        if place > start:
            first, last = max(start, group.num_skipped(place * size)), min(end, place)
            if first < last:
                runs.append((first, last))
    return runs
