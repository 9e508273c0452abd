"""`check` names the invariant that does not hold: each is broken here by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.errors import InvariantViolation
from quire.memory import KVCacheManager, check
from quire.memory.pool.idle_blocks import RetentionPriority
from quire.memory.pool.pool import BlockPool
from quire.memory.prefix.radix_node import NodePosition
from quire.memory.prefix.radix_tree import RadixTree
from tests.memory.world import World
from tests.memory.world_size import WorldSize


def lived_in() -> KVCacheManager:
    """Return a manager with a shared prefix, an idle block, free blocks and a sequence that is about to write."""
    world = World(WorldSize(10, 2))
    world.enter(1, [0, 1, 0, 1, 0])
    world.enter(2, [0, 1, 1, 1, 1])
    world.enter(3, [1, 1])
    world.free(3)
    world.grow(2, 3)
    return world.manager


def pool_of(manager: KVCacheManager) -> BlockPool:
    return manager.groups[0].pool


def position_of(manager: KVCacheManager, block_idx: int) -> NodePosition:
    """Return where a block of the first sequence is published; the second one parts behind the first of them."""
    place = pool_of(manager).index.position_of(manager.block_table(1)[block_idx])
    assert place is not None
    return place


def lose_a_free_block(manager: KVCacheManager) -> None:
    pool_of(manager).free.pop()


def list_a_block_twice(manager: KVCacheManager) -> None:
    pool = pool_of(manager)
    pool.free.append(pool.free[0])


def free_a_published_block(manager: KVCacheManager) -> None:
    pool = pool_of(manager)
    (victim,) = pool.idle.victims(1)
    pool.free.append(victim)
    pool.idle.discard([victim])


def idle_an_unpublished_block(manager: KVCacheManager) -> None:
    pool = pool_of(manager)
    pool.idle.add([pool.free.pop()], RetentionPriority.DEFAULT, [1 << 30])


def miscount_holders(manager: KVCacheManager) -> None:
    pool_of(manager).ref_counts[manager.block_table(1)[0]] += 1


def name_the_null_block(manager: KVCacheManager) -> None:
    manager.sequences[1].tables[0][-1] = 0


def publish_what_is_written_next(manager: KVCacheManager) -> None:
    sequence = manager.sequences[2]
    index = pool_of(manager).index
    index.remove(manager.block_table(2)[1:2])
    index.put(manager.tree.match(sequence.chain, 2).position(1), manager.block_table(2)[-1])


def share_what_is_written_next(manager: KVCacheManager) -> None:
    tail = manager.block_table(2)[-1]
    pool_of(manager).release([manager.block_table(1)[-1]])
    pool_of(manager).retain([tail])
    manager.sequences[1].tables[0][-1] = tail


def change_a_published_block(manager: KVCacheManager) -> None:
    node, _ = position_of(manager, 0)
    node.data[0] ^= 1


def publish_under_two_identities(manager: KVCacheManager) -> None:
    first, (node, position) = position_of(manager, 0), position_of(manager, 1)
    node.blocks[0][position] = pool_of(manager).index.at(first)


def forget_half_of_an_entry(manager: KVCacheManager) -> None:
    node, position = position_of(manager, 1)
    node.blocks[0][position] = 0


def take_a_stem_with_blocks_out(manager: KVCacheManager) -> None:
    node, _ = position_of(manager, 0)
    manager.tree.remove(node)


def forget_a_child(manager: KVCacheManager) -> None:
    node, position = position_of(manager, 1)
    (child, *_) = node.branches[position].values()
    node.drop_child(position, child)


def count_a_block_less(manager: KVCacheManager) -> None:
    node, _ = position_of(manager, 0)
    node.num_published -= 1


def publish_in_a_tree_of_its_own(manager: KVCacheManager) -> None:
    pool_of(manager).index.tree = RadixTree(4, 1, 0)


def hold_other_tokens(manager: KVCacheManager) -> None:
    tables = [state.tables[0] for state in manager.sequences.values()]
    tables[0][1], tables[1][1] = tables[1][1], tables[0][1]


def bury_a_live_block(manager: KVCacheManager) -> None:
    state = manager.sequences[1]
    pool_of(manager).release(state.tables[0][:1])
    state.tables[0][0], state.num_skipped[0] = 0, 1


def lose_a_table_entry(manager: KVCacheManager) -> None:
    pool_of(manager).release([manager.sequences[1].tables[0].pop()])


def compute_without_slots(manager: KVCacheManager) -> None:
    manager.sequences[1].num_computed += 1


@pytest.mark.parametrize(
    ("number", "corrupt"),
    [
        ("M1", lose_a_free_block),
        ("M1", list_a_block_twice),
        ("M1", free_a_published_block),
        ("M1", idle_an_unpublished_block),
        ("M2", miscount_holders),
        ("M2", name_the_null_block),
        ("M3", publish_what_is_written_next),
        ("M3", share_what_is_written_next),
        ("M4", change_a_published_block),
        ("M4", publish_under_two_identities),
        ("M4", forget_half_of_an_entry),
        ("M4", take_a_stem_with_blocks_out),
        ("M4", forget_a_child),
        ("M4", count_a_block_less),
        ("M4", publish_in_a_tree_of_its_own),
        ("M5", hold_other_tokens),
        ("M5", bury_a_live_block),
        ("M6", lose_a_table_entry),
        ("M6", compute_without_slots),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_broken_invariant_is_named(number: str, corrupt: Callable[[KVCacheManager], None]) -> None:
    manager = lived_in()
    check(manager)
    corrupt(manager)
    with pytest.raises(InvariantViolation, match=f"invariant {number}: ") as caught:
        check(manager)
    assert caught.value.number == number
