"""Full checks of all invariants of the memory manager: for tests and debugging, too slow for each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from quire.errors import InvariantViolation
from quire.memory.groups.cache_group import CacheGroup
from quire.memory.manager import KVCacheManager
from quire.memory.pool.arena import Arena
from quire.memory.pool.idle_blocks import RetentionPriority
from quire.memory.pool.pool import NULL_BLOCK
from quire.memory.prefix.prompt_embeddings import read_entries
from quire.memory.prefix.published import PublishedBlocks
from quire.memory.prefix.radix_node import RadixNode
from quire.memory.prefix.radix_tree import RadixTree
from quire.memory.prefix.token_chain import TOKEN_BYTES, block_digest
from quire.memory.results import Tier
from quire.memory.sequence_blocks import SequenceBlocks


def check(manager: KVCacheManager) -> None:
    """Verify M1 to M6; M11 follows from M1 and M2, since without sequences no block has a holder."""
    _check_tree(manager)
    for tier in (Tier.DEVICE, Tier.HOST) if manager.host is not None else (Tier.DEVICE,):
        _check_tier(manager, tier)
    num_swapped = sum(state.is_swapped for state in manager.sequences.values())
    if num_swapped != (manager.host.num_sequences if manager.host is not None else 0):
        raise InvariantViolation("M1", f"{num_swapped} sequences are swapped out, the host counts another number")
    if manager.arena.moves:
        raise InvariantViolation("M5", f"tables are not updated for moved blocks: {manager.arena.moves}")


def _check_tier(manager: KVCacheManager, tier: Tier) -> None:
    """Verify the blocks of one tier."""
    on_device = tier is Tier.DEVICE
    groups = manager.tables.groups_on(tier)
    arena = manager.arena if manager.host is None or on_device else manager.host.arena
    _check_slabs(arena)
    _check_retention(arena)
    for idx, group in enumerate(groups):
        holders = Counter(
            block_id
            for state in manager.sequences.values()
            for block_id in state.tables_on(tier)[idx][state.num_skipped[idx] :]
        )
        if on_device:
            holders += manager.pins.counts(idx)
            holders += Counter(
                state.checkpoint.block_ids[idx]
                for state in manager.sequences.values()
                if state.checkpoint is not None and idx in state.checkpoint.block_ids
            )
        _check_partition(group, holders, _blocks_of_slabs(arena, idx))
        _check_index(group)
        for seq_id, state in manager.sequences.items():
            if state.is_swapped != on_device:
                _check_table(group, seq_id, state, idx, state.tables_on(tier)[idx])
                _check_places(group, seq_id, state, idx, state.tables_on(tier)[idx], all_published=state.is_publishing)
            elif state.tables_on(tier)[idx]:
                raise InvariantViolation("M2", f"sequence {seq_id} has blocks on both tiers")


def snapshot(manager: KVCacheManager) -> tuple[object, ...]:
    """Return the whole observable state as a comparable value: equal snapshots behave alike (M7, M10)."""
    sequences = tuple(
        (
            seq_id,
            (tuple(state.chain.tokens), state.chain.media),
            tuple(map(tuple, state.tables)),
            None if state.host_tables is None else tuple(map(tuple, state.host_tables)),
            tuple(state.num_skipped),
            state.num_slots,
            state.num_computed,
            state.num_published,
            state.is_publishing,
            state.next_publish_at,
            state.snapshot_points,
            state.checkpoint and (state.checkpoint.num_tokens, tuple(sorted(state.checkpoint.block_ids.items()))),
            state.tail_is_private,
            tuple(state.dirty_from),
        )
        for seq_id, state in sorted(manager.sequences.items())
    )
    pools = tuple(
        (
            tuple(group.pool.free),
            tuple(group.pool.idle),
            tuple(tuple(queue.items()) for queue in group.pool.idle.queues),
            tuple(group.pool.ref_counts),
        )
        for group in (*manager.groups, *(manager.host.groups if manager.host else ()))
    )
    slabs = tuple(
        (
            tuple(arena.free_slabs),
            tuple(tuple(sorted(group.slabs())) for group in arena.group_slabs),
            tuple(
                (tuple(group.used.items()), tuple(tuple(queue.items()) for queue in group.idle_slabs))
                for group in arena.group_slabs
            ),
            tuple(arena.retention.hints()),
        )
        for arena in (manager.arena, *((manager.host.arena,) if manager.host else ()))
    )
    pending = tuple(manager.tables.pending_copies)
    return sequences, pools, slabs, manager.tree.snapshot(), manager.pins.snapshot(), pending


def _blocks_of_slabs(arena: Arena, group_idx: int) -> list[int]:
    """Return the blocks that a group has."""
    if len(arena.pools) == 1:
        return list(range(1, arena.layout.num_slabs + 1))
    return sorted(
        block for slab in arena.group_slabs[group_idx].slabs() for block in arena.layout.blocks_of(group_idx, slab)
    )


def _check_slabs(arena: Arena) -> None:
    """M1: a slab is free or belongs to one group, with used or idle blocks of it in the slab; its counts are right."""
    if len(arena.pools) == 1:
        return
    slabs = sorted([*arena.free_slabs, *(slab for group in arena.group_slabs for slab in group.slabs())])
    if slabs != list(range(arena.layout.num_slabs)):
        raise InvariantViolation(
            "M1", f"free slabs and slabs of groups are {slabs}, expected {arena.layout.num_slabs} slabs"
        )
    for group, per_slab in zip(arena.group_slabs, arena.layout.blocks_per_slab, strict=True):
        at_rest = [
            set(queue if per_slab > 1 else arena.layout.slabs_of(group.group_idx, queue)) for queue in group.idle_slabs
        ]
        expected: list[set[int]] = [set() for _ in RetentionPriority]
        for slab in group.slabs():
            blocks = arena.layout.blocks_of(group.group_idx, slab)
            num_used = sum(group.pool.ref_counts[block_id] > 0 for block_id in blocks)
            if per_slab > 1 and group.used[slab] != num_used:
                raise InvariantViolation("M1", f"slab {slab} counts {group.used[slab]} used blocks, has {num_used}")
            priorities = [
                priority
                for priority, queue in zip(RetentionPriority, group.pool.idle.queues, strict=True)
                if any(block_id in queue for block_id in blocks)
            ]
            if not num_used and not priorities:
                raise InvariantViolation("M1", f"group {group.group_idx} has slab {slab} without used or idle blocks")
            if not num_used:
                expected[max(priorities)].add(slab)
        if at_rest != expected:
            raise InvariantViolation("M1", f"idle slabs by retention priority are {at_rest}, expected {expected}")


def _check_retention(arena: Arena) -> None:
    """M1: retained blocks are published and within the limit, and the idle ones are evicted last."""
    retention = arena.retention
    hints = set(retention.hints())
    num_bytes = sum(arena.layout.block_bytes[idx] for idx, _ in hints)
    if num_bytes != retention.num_bytes or num_bytes > retention.limit_bytes:
        raise InvariantViolation("M1", f"{num_bytes} bytes are retained, the limit is {retention.limit_bytes}")
    for idx, pool in enumerate(arena.pools):
        for block_id in retention.of_group[idx]:
            if block_id not in pool.index:
                raise InvariantViolation("M1", f"retained block {block_id} is not published")
        if {(idx, block_id) for block_id in retention.of_group[idx]} != {hint for hint in hints if hint[0] == idx}:
            raise InvariantViolation("M1", f"the retained blocks of group {idx} differ from the ordered ones")
        hinted = {block_id for block_id in pool.idle if block_id in retention.of_group[idx]}
        last = set(pool.idle.queues[RetentionPriority.HIGH])
        if hinted != last:
            raise InvariantViolation("M1", f"idle blocks {sorted(last)} are evicted last, expected {sorted(hinted)}")
        if list(pool.idle) != pool.idle.victims(len(pool.idle)):
            raise InvariantViolation("M1", f"idle blocks {list(pool.idle)} are not in the order of eviction")


def _check_partition(group: CacheGroup, holders: Counter[int], lent: list[int]) -> None:
    """M1: free, idle, used and null are disjoint and complete. M2: reference counts equal table entries."""
    pool = group.pool
    free, idle = list(pool.free), list(pool.idle)
    used = [block_id for block_id, count in enumerate(pool.ref_counts) if count > 0]
    if sorted([*free, *idle, *used]) != lent:
        raise InvariantViolation("M1", f"free {free}, idle {idle} and used {used} differ from the group's {lent}")
    if pool.num_used != len(used):
        raise InvariantViolation("M1", f"{pool.num_used} blocks count as used, but {len(used)} are used")
    for block_id, count in enumerate(pool.ref_counts):
        if count != holders[block_id]:
            raise InvariantViolation("M2", f"block {block_id} counts {count} holders, but has {holders[block_id]}")
    for block_id in pool.idle:
        if block_id not in pool.index:
            raise InvariantViolation("M1", f"idle block {block_id} is not published")
    for block_id in free:
        if block_id in pool.index:
            raise InvariantViolation("M1", f"free block {block_id} is published")


def _check_index(group: CacheGroup) -> None:
    """M4: a position has one block and a block one position, in the tree, with a whole block's content or less."""
    index, size = group.pool.index, group.spec.block_size
    positions = {
        block_id: node_position
        for block_id in range(index.num_ids)
        if (node_position := index.position_of(block_id)) is not None
    }
    for block_id, (node, position) in positions.items():
        content = node.content(position)
        if len(content) < TOKEN_BYTES or not _is_media(content[TOKEN_BYTES * size :], size):
            raise InvariantViolation("M4", f"block {block_id} is published with the content {content!r}")
        if index.at((node, position)) != block_id:
            raise InvariantViolation("M4", f"another block is published at the position of block {block_id}")
        if not _is_in_tree(index.tree, node):
            raise InvariantViolation("M4", f"block {block_id} is published at a position that is not in the tree")
    if len(positions) != len(index):
        raise InvariantViolation("M4", f"{len(positions)} blocks have a position, but {len(index)} count as published")


def _is_in_tree(tree: RadixTree, node: RadixNode) -> bool:
    """Return whether a node is reached from its root."""
    while node.parent is not None:
        if node.parent.branches.get(node.first - node.parent.first, {}).get(node.name) is not node:
            return False
        node = node.parent
    return tree.roots.get(node.name) is node


def _check_tree(manager: KVCacheManager) -> None:
    """M4: digests match the contents, siblings differ, and the counts of published blocks are right."""
    tree = manager.tree
    indexes = [group.pool.index for group in (*manager.groups, *(manager.host.groups if manager.host else ()))]
    if any(index.tree is not tree for index in indexes):
        raise InvariantViolation("M4", "pools publish in different trees")
    for node in tree.nodes():
        if node.parent is not None:
            if node.parent.name_of_branch(node.content(0)) != node.name:
                raise InvariantViolation("M4", f"the name {node.name!r} of a node is not its digest")
            before = node.parent.digest_before(node.first - node.parent.first)
            if node.digest(0) != block_digest(before, node.content(0)):
                raise InvariantViolation("M4", f"the digest of the first block of node {node.name!r} is another one")
        if node.num_published != sum(block_id != NULL_BLOCK for blocks in node.blocks for block_id in blocks):
            raise InvariantViolation("M4", f"a node counts {node.num_published} published blocks, has another number")
        if any(len(blocks) > node.length for blocks in node.blocks):
            raise InvariantViolation("M4", f"a node of {node.length} positions has blocks past its end")
        for index in indexes:
            for position in range(node.length):
                block_id = index.at((node, position))
                if block_id != NULL_BLOCK and index.position_of(block_id) != (node, position):
                    raise InvariantViolation("M4", f"block {block_id} is at a position that is not recorded for it")
        for position, branches in node.branches.items():
            contents = [branch.content(0) for branch in branches.values()]
            node_content = node.content(position) if position < node.length else None
            if len({*contents, node_content}) != len(contents) + 1 or not 0 <= position <= node.length:
                raise InvariantViolation("M4", f"position {position} of a node has a duplicate or is out of range")
            _check_children(node, position, indexes)


def _check_children(node: RadixNode, position: int, indexes: Sequence[PublishedBlocks]) -> None:
    """M4: the indexed children of a position are the published ones."""
    pool_idx = node.layout.child_index_pool
    if pool_idx is not None:
        index = indexes[pool_idx]
        published = {branch for branch in node.branches[position].values() if index.at((branch, 0))}
        if index.at((node, position)):
            published.add(node)
        indexed = [child for child, _ in node.children_at(position, len(published) + 1)]
        if len(indexed) != len(published) or set(indexed) != published:
            raise InvariantViolation(
                "M4", f"{len(indexed)} children are indexed at a position that has {len(published)}"
            )


def _is_media(entries: bytes, block_size: int) -> bool:
    """Return whether the bytes after the tokens of a whole block are entries of media that touch it."""
    try:
        spans = read_entries(entries)
    except ValueError:
        return False
    return all(span.start < block_size and 0 < span.end <= block_size and span.num_tokens > 0 for span in spans)


def _check_table(group: CacheGroup, seq_id: int, state: SequenceBlocks, group_idx: int, table: list[int]) -> None:
    """M3: blocks to be written are private. M5: only dead blocks are null entries. M6: lengths agree."""
    pool, size, computed = group.pool, group.spec.block_size, state.num_computed
    num_skipped = state.num_skipped[group_idx]
    if len(table) != group.spec.num_blocks(state.num_slots):
        raise InvariantViolation("M6", f"sequence {seq_id}: {len(table)} blocks for {state.num_slots} slots")
    if not 0 <= computed <= state.num_slots:
        raise InvariantViolation("M6", f"sequence {seq_id}: {computed} of {state.num_slots} slots computed")
    if num_skipped != group.num_skipped(state.num_slots if group.spec.is_recurrent else computed):
        raise InvariantViolation("M5", f"sequence {seq_id}: {num_skipped} blocks dead at {computed} tokens")
    for i, block_id in enumerate(table):
        if (block_id == NULL_BLOCK) != (i < num_skipped):
            raise InvariantViolation("M5", f"sequence {seq_id}: entry {i} is {block_id}, {num_skipped} blocks are dead")
    if computed < state.num_slots:
        for block_id in table[max(computed // size, num_skipped) :]:
            if pool.ref_counts[block_id] > 1 or block_id in pool.index:
                raise InvariantViolation("M3", f"sequence {seq_id} will write shared or published block {block_id}")


def _check_places(
    group: CacheGroup, seq_id: int, state: SequenceBlocks, group_idx: int, table: Sequence[int], *, all_published: bool
) -> None:
    """M5: live blocks hold the sequence's tokens.

    A state need not be published; a published one covers whole blocks, and no more tokens than are computed.
    """
    size, is_recurrent = group.spec.block_size, group.spec.is_recurrent
    chain, index = state.chain, group.pool.index
    chain.encode(state.num_published)
    # Matched again with a fresh chain, because the chain's cursor may be wrong.
    published = index.published(chain.fresh(), 0, state.num_published)
    for i in range(state.num_skipped[group_idx], len(table) if is_recurrent else state.num_published):
        if table[i] not in index:
            is_wrong = all_published and not is_recurrent
        else:
            is_full = (i + 1) * size <= state.num_computed
            is_wrong = not (is_full and i < state.num_published and published[i] == table[i])
        if is_wrong:
            raise InvariantViolation("M5", f"sequence {seq_id}: block {table[i]} holds other tokens")
