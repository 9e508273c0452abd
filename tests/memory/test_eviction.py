"""The order of eviction of each policy, and resets of the prefix cache."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence

import pytest

from quire.memory import HitEnd
from quire.memory.pool.eviction import EVICTION_POLICIES, SegmentedLru
from quire.memory.pool.idle_blocks import IdleBlocks, RetentionPriority
from quire.memory.pool.idle_queue import Ticker
from quire.memory.pool.retention import Retention
from quire.memory.pool.slab_layout import lay_out
from tests.memory.host_world import path_to
from tests.memory.twin_pages import Kind
from tests.memory.walk import random_walk
from tests.memory.world import NAMESPACES, World
from tests.memory.world_size import WorldSize

CLOCK = Ticker()


def hit_length(world: World, tokens: list[int]) -> int:
    return world.manager.match_prefix(world.manager.chain(tokens, NAMESPACES[0])).num_tokens


def lived_in(eviction: str) -> World:
    """Return a world in which 0 was stored first, then 1, then 2; 1 was hit once and 0 twice, and 1 last."""
    world = World(WorldSize(8, 1, eviction=eviction), has_twin=False)
    for seq_id, token in enumerate((0, 1, 2, 0, 0, 1)):
        world.enter(seq_id, [token, token])
        world.free(seq_id)
    return world


@pytest.mark.parametrize(
    ("eviction", "order"), [("lru", [2, 0, 1]), ("fifo", [0, 1, 2]), ("lfu", [2, 1, 0]), ("slru", [2, 0, 1])]
)
def test_each_policy_has_its_order_and_tails_go_before_heads(eviction: str, order: list[int]) -> None:
    world = lived_in(eviction)
    # A hit covers the first block only, so only heads were hit; the tails were stored anew and merged, as hits are.
    pool = world.manager.groups[0].pool
    victims = [path_to(place)[1] for place in map(pool.index.position_of, pool.idle) if place is not None]
    assert [path[0][0] for path in victims if len(path) == 1] == order
    for token in order:
        tail, _ = [i for i, path in enumerate(victims) if path[-1][0] == token]
        assert len(victims[tail]) == 2, "the tail goes before its head"


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
@pytest.mark.parametrize("kinds", [(Kind(),), (Kind(), Kind("window", 3))])
@pytest.mark.parametrize("seed", range(4))
def test_random_commands_under_every_policy(eviction: str, kinds: tuple[Kind, ...], seed: int) -> None:
    world = World(WorldSize(6, 2, kinds=kinds, eviction=eviction), has_twin=False)
    random_walk(world, random.Random(seed), 80)


@pytest.mark.parametrize("kinds", [(Kind(),), (Kind("window", 5),), (Kind(), Kind("window", 3))])
@pytest.mark.parametrize("seed", range(2))
def test_prompts_read_their_own_blocks_whichever_were_evicted(kinds: tuple[Kind, ...], seed: int) -> None:
    """Heads are evicted too, which policies seldom evict before the blocks behind them."""
    world, rng = World(WorldSize(12, 2, kinds=kinds), has_twin=False), random.Random(seed)
    for seq_id in range(60):
        num_alike = rng.randrange(8)
        world.enter(seq_id, [0] * num_alike + [1] * (7 - num_alike))
        world.free(seq_id)
        for group_idx, group in enumerate(world.manager.groups):
            world.evict(group_idx, rng.choice(list(group.pool.idle)))


def test_a_hit_ends_before_an_evicted_block_though_later_ones_are_published() -> None:
    """Else a prompt would read another prompt's keys and values, in silence."""
    world = World(WorldSize(4, 4, eviction="fifo"), has_twin=False)
    # The head was published first, and is evicted first.
    for seq_id, tokens in enumerate((range(4), range(8), range(50, 62))):
        world.enter(seq_id, list(tokens))
        world.free(seq_id)
    chain = world.manager.chain(list(range(9)), NAMESPACES[0])
    published = world.manager.groups[0].pool.index.published(chain, 0, 2)
    assert [block_id > 0 for block_id in published] == [False, True]
    hit = world.manager.match_prefix(chain)
    assert (hit.num_tokens, hit.end) == (0, HitEnd.EVICTED)


def idle_blocks(eviction: str) -> IdleBlocks:
    return IdleBlocks(EVICTION_POLICIES[eviction], CLOCK, Retention(lay_out([1], num_slabs=1), 0), 0)


def rest(idle: IdleBlocks, block_ids: Sequence[int], priority: RetentionPriority = RetentionPriority.DEFAULT) -> None:
    idle.add(block_ids, priority, CLOCK.ticks(len(block_ids)))


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_a_policy_forgets_what_is_evicted(eviction: str) -> None:
    idle = idle_blocks(eviction)
    for block_id in (1, 2):
        rest(idle, [block_id])
        idle.discard([block_id])
        rest(idle, [block_id])
    idle.remove([1])
    assert (len(idle), list(idle), idle.victims(1)) == (1, [2], [2])
    rest(idle, [1])
    assert sorted(idle) == [1, 2]
    idle.forget([3])


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_choosing_victims_is_in_order_and_changes_nothing(eviction: str, seed: int) -> None:
    idle, rng = idle_blocks(eviction), random.Random(seed)
    rest(idle, range(8))
    for _ in range(20):
        hit = rng.sample(range(8), 3)
        idle.discard(hit)
        rest(idle, hit, rng.choice(tuple(RetentionPriority)[:2]))
        order, count = list(idle), rng.randrange(9)
        assert idle.victims(count) == order[:count]
        assert list(idle) == order
        ages = idle.ages_of_victims(8)
        low = list(idle.queues[RetentionPriority.LOW])
        assert order[: len(low)] == low, "what has a low priority goes first, whatever the policy"
        assert max(ages[: len(low)], default=0) < min(ages[len(low) :], default=1 << 63)


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_a_policy_keeps_no_more_of_a_block_that_is_hit_more_often(eviction: str) -> None:
    def traced_bytes(num_hits: int) -> int:
        idle, blocks = idle_blocks(eviction), range(1, 65)
        tracemalloc.start()
        rest(idle, blocks)
        for _ in range(num_hits):
            idle.discard(blocks)
            rest(idle, blocks)
        traced, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(idle) == 64
        return traced

    few, many = traced_bytes(100), traced_bytes(3000)
    assert many <= few + 100_000, f"{few} bytes after 100 hits of each block, {many} after 3,000"


def test_protection_is_for_a_share_of_the_idle_blocks() -> None:
    policy = SegmentedLru()
    policy.add(range(5))
    for block_id in range(5):
        policy.discard([block_id])
        policy.add([block_id])
    assert list(policy) == [0, 1, 2, 3, 4]
    policy.add([5])
    assert policy.victims(1) == [0], "0 is protected no more, and older than 5"


# ---- reset ----


def test_after_a_reset_nothing_is_hit_and_everything_can_be_had() -> None:
    world = World(WorldSize(6, 2))
    world.enter(1, [0] * 8)
    world.free(1)
    world.reset()
    usage = world.manager.usage()
    assert (usage.idle, usage.free, hit_length(world, [0] * 9)) == (0, 6, 0)
    world.enter(2, [1] * 12)
    assert world.manager.usage().num_evictions == 0
    assert hit_length(world, [1] * 13) == 12


def test_live_sequences_keep_their_blocks_and_publish_no_more() -> None:
    world = World(WorldSize(8, 2))
    world.enter(1, [0] * 4)
    table = world.manager.block_table(1)
    world.reset()
    assert world.manager.block_table(1) == table
    world.fork(1, 2, [0, 0])
    assert world.grow(2, 2)
    world.store(2, 2)
    assert hit_length(world, [0] * 7) == 0
    world.enter(3, [0] * 4)
    assert hit_length(world, [0] * 5) == 4


@pytest.mark.parametrize("layers", [(1, 1), (1, 4)])
def test_a_reset_gives_every_idle_block_and_slab_back(layers: tuple[int, int]) -> None:
    kinds = (Kind(), Kind("window", 2))
    world = World(WorldSize(0, 1, kinds=kinds, layers=layers, num_bytes=120, host_bytes=60), has_twin=False)
    world.enter(1, [0, 1, 0, 1])
    for seq_id in (2, 3):
        world.enter(seq_id, [seq_id, seq_id, seq_id])
        world.free(seq_id)
    world.reset()
    usage = world.manager.usage()
    assert (usage.idle, usage.host.idle) == (0, 0)  # type: ignore[union-attr]
    assert usage.num_evictions == 0, "what a reset takes is not evicted"
    world.free(1)
    arena = world.manager.arena
    assert len(arena.free_slabs) == arena.layout.num_slabs, "who lived gives back what nothing can hit"
