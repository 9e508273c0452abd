"""The commands of the memory manager, one by one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.memory import FullAttention, HitEnd, KVCacheManager, Namespace, PrefixHit, Verdict, check
from quire.memory.invariants import snapshot
from quire.memory.pool.pool import NULL_BLOCK
from tests.memory.twin_pages import Kind
from tests.memory.walk import random_walk
from tests.memory.world import NAMESPACES, World
from tests.memory.world_size import WorldSize

SPEC = FullAttention(block_size=4)


def ask(manager: KVCacheManager, tokens: list[int], max_tokens: int | None = None) -> PrefixHit:
    return manager.match_prefix(manager.chain(tokens, Namespace()), max_tokens)


# ---- hits ----


def test_a_hit_leaves_a_token_to_compute_and_has_a_reason() -> None:
    world = World(WorldSize(8, 4))
    world.enter(1, list(range(12)))
    manager = world.manager
    published = list(range(12))
    table = manager.block_table(1)
    assert ask(manager, published)[:3] == (11, (table,), HitEnd.LAST_TOKEN)
    assert ask(manager, [*published, 12])[:3] == (12, (table,), HitEnd.LAST_TOKEN)
    assert ask(manager, [*published, 12, 13])[:3] == (12, (table,), HitEnd.NOT_CACHED)
    assert ask(manager, published[:4])[:3] == (3, (table[:1],), HitEnd.LAST_TOKEN)
    assert ask(manager, published[:1])[:3] == (0, ((),), HitEnd.LAST_TOKEN)
    parting = [*published[:8], 99, 99, 99, 99, 99]
    assert ask(manager, parting)[:3] == (8, (table[:2],), HitEnd.NOT_CACHED)


@pytest.mark.parametrize(
    ("max_tokens", "num_tokens"), [(None, 12), (99, 12), (12, 12), (11, 11), (4, 4), (3, 3), (0, 0)]
)
def test_the_caller_may_limit_a_hit(max_tokens: int | None, num_tokens: int) -> None:
    world = World(WorldSize(8, 4))
    world.enter(1, list(range(13)))
    hit = ask(world.manager, list(range(14)), max_tokens)
    assert hit.num_tokens == num_tokens
    assert hit.num_copied == num_tokens % 4
    assert hit.end is (HitEnd.NOT_CACHED if max_tokens in (None, 99) else HitEnd.LIMIT)


def test_without_caching_nothing_is_published_or_found() -> None:
    world = World(WorldSize(8, 4, caching=False, kinds=(Kind(), Kind())))
    world.enter(1, list(range(12)))
    hit = ask(world.manager, list(range(12)))
    assert (hit.num_tokens, hit.block_ids, hit.end) == (0, ((), ()), HitEnd.LIMIT)
    world.free(1)
    assert world.manager.usage().idle == 0


def test_a_hit_is_as_long_as_the_shortest_group() -> None:
    world = World(WorldSize(4, 1, kinds=(Kind(), Kind())))
    world.enter(1, [0, 1, 1])
    world.free(1)
    world.evict(1, next(iter(world.manager.groups[1].pool.idle)))
    hit = ask(world.manager, [0, 1, 1, 0])
    assert hit.num_tokens == 2
    assert [len(blocks) for blocks in hit.block_ids] == [2, 2]


# ---- can_allocate: both numbers ----


def test_never_names_what_is_needed_and_what_exists() -> None:
    manager = KVCacheManager([SPEC], 3, watermark=2)
    assert manager.capacity.can_allocate(13, ask(manager, [0] * 13)) == (Verdict.NEVER, 0, 4, 3)
    assert manager.capacity.can_allocate(12, ask(manager, [0] * 12), reserved=(9,)) == (Verdict.OK, 0, 3, 3)


def test_the_watermark_holds_only_beside_other_sequences() -> None:
    world = World(WorldSize(6, 4, watermark=1))
    assert world.enter(1, [1] * 8)
    hit = ask(world.manager, [2] * 12)
    assert world.manager.capacity.can_allocate(12, hit) == (Verdict.OK, 0, 3, 3)
    assert world.manager.capacity.can_allocate(12, hit, reserved=(1,)) == (Verdict.LATER, 0, 4, 3)
    world.free(1)
    assert world.manager.capacity.can_allocate(24, hit, reserved=(1,)) == (Verdict.OK, 0, 6, 6)


def test_idle_blocks_of_the_hit_are_not_counted_twice() -> None:
    world = World(WorldSize(4, 1))
    world.enter(1, [0, 1, 0])
    world.free(1)
    hit = ask(world.manager, [0, 1, 0, 1])
    assert hit.num_tokens == 3
    assert world.manager.capacity.can_allocate(4, hit) == (Verdict.OK, 0, 1, 1)
    assert world.enter(2, [0, 1, 0, 1])


def test_groups_take_from_each_other() -> None:
    manager = KVCacheManager([SPEC, SPEC, SPEC], 4)
    manager.groups[1].pool.take(3)
    hit = ask(manager, [0] * 8)
    assert manager.capacity.can_allocate(12, hit) == (Verdict.OK, 0, 3, 3)
    assert manager.capacity.can_allocate(13, hit) == (Verdict.LATER, 0, 4, 1)
    assert manager.capacity.can_allocate(17, hit) == (Verdict.NEVER, 0, 5, 2)


def test_blocks_missing() -> None:
    world = World(WorldSize(8, 4, kinds=(Kind(), Kind())))
    world.enter(1, [0] * 5)
    capacity = world.manager.capacity
    assert [capacity.blocks_missing(1, length) for length in (5, 8, 9, 20)] == [
        (0, 0),
        (0, 0),
        (1, 1),
        (3, 3),
    ]


# ---- copy-on-write and merging ----


def test_one_copy_for_each_writer_but_the_last() -> None:
    world = World(WorldSize(20, 4))
    world.enter(1, [0] * 6)
    for child in (2, 3, 4):
        world.fork(1, child, [])
    for count, seq_id in enumerate((3, 1, 4, 2)):
        assert world.manager.usage().num_copies == count
        world.grow(seq_id, 1)
        world.tokens[seq_id].append(seq_id)
        world.store(seq_id, 1)
    assert world.manager.usage().num_copies == 3
    tables = [world.manager.block_table(seq_id) for seq_id in (1, 2, 3, 4)]
    assert len({table[0] for table in tables}) == 1
    assert len({table[1] for table in tables}) == 4


def test_a_full_tail_is_shared_without_a_copy() -> None:
    world = World(WorldSize(20, 4))
    world.enter(1, [0] * 8)
    world.fork(1, 2, [])
    assert world.grow(1, 1)
    assert world.grow(2, 1)
    assert world.manager.usage().num_copies == 0


def test_a_copy_that_cannot_be_had_refuses_the_growth() -> None:
    world = World(WorldSize(2, 4))
    world.enter(1, [0] * 6)
    world.fork(1, 2, [])
    assert not world.grow(1, 1)
    world.free(2)
    assert world.grow(1, 1), "the last holder needs no copy"


def test_copies_are_handed_over_once_and_in_order() -> None:
    manager = KVCacheManager([SPEC], 8)
    tokens = [0] * 6
    chain = manager.chain(tokens, Namespace())
    manager.allocate(1, chain, manager.match_prefix(chain))
    manager.append_slots((1,), 6)
    manager.publish(1, 6)
    manager.fork(1, 2, list(tokens))
    manager.fork(1, 3, list(tokens))
    assert manager.append_slots((2,), 1)
    assert manager.append_slots((3,), 1)
    tail = manager.block_table(1)[1]
    copies = [(copy.src_id, copy.dst_id) for copy in manager.take_ops().copies]
    assert copies == [(tail, manager.block_table(2)[1]), (tail, manager.block_table(3)[1])]
    assert manager.take_ops().copies == ()


def test_duplicates_are_merged_and_given_back() -> None:
    world = World(WorldSize(8, 4))
    for seq_id in (1, 2):
        world.open(seq_id, [7] * 8)
        world.grow(seq_id, 8)
    assert world.manager.usage().used == 4
    world.store(1, 8)
    world.store(2, 8)
    assert world.manager.block_table(1) == world.manager.block_table(2)
    usage = world.manager.usage()
    assert (usage.used, usage.num_merges, usage.num_tokens, usage.used_fraction) == (2, 2, 16, 0.25)


def test_a_rewritten_block_is_copied_where_there_is_room() -> None:
    world = World(WorldSize(8, 2))
    world.enter(1, [0, 0, 1, 1, 0, 0])
    world.truncate(1, 1)
    world.grow(1, 1)
    assert world.manager.usage().num_copies == 1
    assert ask(world.manager, [0, 0, 1, 1, 0, 0, 0]).num_tokens == 6


def test_without_room_a_rewritten_block_leaves_the_index() -> None:
    world = World(WorldSize(4, 2))
    world.enter(2, [1] * 6)
    world.enter(1, [0, 0])
    world.truncate(1, 1)
    assert ask(world.manager, [0, 0, 0]).num_tokens == 2, "still found while nobody writes"
    world.grow(1, 1)
    assert world.manager.usage().num_copies == 0
    assert ask(world.manager, [0, 0, 0]).num_tokens == 0


# ---- eviction ----


def test_tails_are_evicted_before_heads_and_old_before_young() -> None:
    world = World(WorldSize(6, 1))
    world.enter(1, [0, 1, 0])
    world.enter(2, [1, 1, 1])
    first, second = world.manager.block_table(1), world.manager.block_table(2)
    world.free(1)
    world.free(2)
    assert tuple(world.manager.groups[0].pool.idle) == first[::-1] + second[::-1]
    assert ask(world.manager, [0, 1, 0, 1]).num_tokens == 3
    world.enter(3, [0, 0])  # hits the head of the first, evicts its tail
    assert world.manager.usage().num_evictions == 1
    assert [ask(world.manager, tokens).num_tokens for tokens in ([0, 1, 0, 1], [1, 1, 1, 1])] == [2, 3]


def test_being_hit_makes_a_block_young() -> None:
    world = World(WorldSize(4, 1))
    for seq_id, token in enumerate((0, 1)):
        world.enter(seq_id, [token, token])
    for seq_id in (0, 1):
        world.free(seq_id)
    world.enter(2, [0, 0])
    world.free(2)
    world.enter(3, [2, 2])
    assert [ask(world.manager, [token] * 3).num_tokens for token in (0, 1)] == [2, 0]


# ---- determinism, refusals, the null block ----


@given(seed=st.integers(0, 2**32), num_blocks=st.integers(1, 9), block_size=st.integers(1, 3))
def test_M10_same_commands_same_ids(seed: int, num_blocks: int, block_size: int) -> None:
    def trace() -> tuple[object, ...]:
        world = World(WorldSize(num_blocks, block_size))
        random_walk(world, random.Random(seed), 25)
        return snapshot(world.manager)

    assert trace() == trace()


def test_a_fresh_pool_hands_out_ascending_blocks_and_never_the_null_block() -> None:
    world = World(WorldSize(5, 1))
    world.enter(1, [0, 1, 0, 1, 1])
    assert world.manager.block_table(1) == (1, 2, 3, 4, 5)
    assert NULL_BLOCK not in world.manager.block_table(1)


def test_tables_and_ops_are_handed_over_as_values() -> None:
    world = World(WorldSize(5, 2))
    world.open(1, [0, 1, 0])
    world.grow(1, 3)
    first = world.manager.take_table_deltas((1,))[0]
    world.grow(1, 2)
    second = world.manager.take_table_deltas((1,))[0]
    world.truncate(1, 1)
    third = world.manager.take_table_deltas((1,))[0]
    assert (first, second, third) == (((0, 0, (1, 2)),), ((0, 2, (3,)),), ((0, 1, ()),))
    assert world.manager.take_table_deltas((1,))[0] == ()


def test_groups_must_share_one_block_size() -> None:
    with pytest.raises(ValueError, match=r"one block size, got \[4, 8\]"):
        KVCacheManager([SPEC, FullAttention(block_size=8)], 4)
    with pytest.raises(ValueError, match=r"got \[\]"):
        KVCacheManager([], 4)


def test_bytes_of_a_block() -> None:
    spec = FullAttention(block_size=16, num_layers=24, num_kv_heads=2, head_dim=64, element_bytes=2)
    assert spec.bytes_per_block == 16 * 24 * 2 * 2 * 64 * 2
    assert [spec.num_blocks(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_other_tenants_never_hit() -> None:
    world = World(WorldSize(8, 2))
    world.enter(1, [0] * 6, NAMESPACES[0])
    chain = world.manager.chain([0] * 6, NAMESPACES[1])
    assert world.manager.match_prefix(chain).num_tokens == 0


def test_check_finds_an_honest_manager_in_order() -> None:
    world = World(WorldSize(8, 2))
    world.enter(1, [0] * 6)
    check(world.manager)
