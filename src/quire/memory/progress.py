"""What happens as a sequence is computed: blocks fill and are published, and blocks die."""

from __future__ import annotations

from collections.abc import Sequence

from quire.memory.chain import Link
from quire.memory.groups import CacheGroup
from quire.memory.pool import NULL_BLOCK
from quire.memory.sequence_memory import SequenceMemory
from quire.memory.specs import IMMORTAL


def next_event(groups: Sequence[CacheGroup], mortal: Sequence[int], state: SequenceMemory) -> int:
    """Return the least number of computed tokens at which there is more to do than to count.

    Args:
        groups: all cache groups, with one block size.
        mortal: which of them have blocks that die.
        state: of the sequence.
    """
    event = IMMORTAL
    if state.is_publishing:
        event = (state.num_published + 1) * groups[0].spec.block_size
    for idx in mortal:
        event = min(event, groups[idx].spec.death(state.num_dead[idx]))
    return event


def publish_blocks(groups: Sequence[CacheGroup], state: SequenceMemory, num_full: int) -> int:
    """Publish the blocks `[num_published, num_full)` of a sequence, or merge them with their equals.

    It is so in every group but those of states, which have nothing to show for most blocks.

    Returns:
        The duplicates that were given back.
    """
    start, chain = state.num_published, state.chain
    is_one = num_full - start == 1
    if is_one and _publish_next(groups, state, chain.link(start)):  # as sequences decode
        return 0
    kept = [idx for idx, group in enumerate(groups) if not group.carries]
    if is_one:
        return _publish_or_merge(groups, kept, state, num_full)
    digests = chain.digests(num_full)[start:num_full]
    # What is new must be so in every group: all groups publish the same blocks.
    num_new = min((groups[idx].pool.index.num_new(digests) for idx in kept[1:]), default=len(digests))
    if num_new:
        links = chain.links(start + num_new)[start : start + num_new]
        for idx in kept:
            block_ids = state.tables[idx][start : start + num_new]
            num_new = groups[idx].pool.index.add_run(digests[:num_new], links[:num_new], block_ids)
    state.num_published = end = start + num_new
    return _publish_or_merge(groups, kept, state, num_full) if end < num_full else 0


def _publish_next(groups: Sequence[CacheGroup], state: SequenceMemory, link: Link) -> bool:
    """Publish one block more; or change nothing, and return False, where its digest is taken in some group."""
    digest, block_idx = link[0], state.num_published
    for group in groups:
        if group.pool.index.get(digest) is not None:
            return False
    for group, table in zip(groups, state.tables, strict=True):
        if not group.carries:
            group.pool.index.add(link, table[block_idx])
    state.num_published = block_idx + 1
    return True


def _publish_or_merge(groups: Sequence[CacheGroup], kept: Sequence[int], state: SequenceMemory, num_full: int) -> int:
    """Publish block by block, where some digests are taken: by equal blocks, or by a collision."""
    chain = state.chain
    digests = chain.digests(num_full)
    num_merges = 0
    for i in range(state.num_published, num_full):
        found = [groups[idx].pool.index.get(digests[i]) for idx in kept]
        if any(found) and any(entry is not None and not chain.recognises(i, entry[1]) for entry in found):
            # A collision: identities of later blocks would chain from an ambiguous parent.
            state.is_publishing = False
            break
        link = chain.links(i + 1)[i]
        for group_idx, entry in zip(kept, found, strict=True):
            group, table = groups[group_idx], state.tables[group_idx]
            if entry is None:
                group.pool.index.add(link, table[i])
            else:
                group.pool.retain(entry[:1])
                group.pool.release((table[i],))
                table[i] = entry[0]
                state.mark_dirty(group_idx, i)
                num_merges += 1
        state.num_published = i + 1
    return num_merges


def bury(group: CacheGroup, state: SequenceMemory, group_idx: int) -> None:
    """Give the blocks of a group back that have died, and put null entries in their place."""
    table = state.tables[group_idx]
    old, new = state.num_dead[group_idx], group.num_dead(state.num_computed)
    if old < new:
        group.pool.release(table[old:new])
        table[old:new] = [NULL_BLOCK] * (new - old)
        state.num_dead[group_idx] = new
        state.mark_dirty(group_idx, old)
