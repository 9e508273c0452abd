"""Blocks with the hint are evicted after all others, within a limit, and never instead of giving memory."""

from __future__ import annotations

import random

import pytest

from quire.errors import InvariantViolation
from quire.memory import check
from quire.memory.pool.eviction import EVICTION_POLICIES
from quire.memory.pool.retention import Retention
from tests.memory.test_eviction import hit_length
from tests.memory.twin_pages import Kind
from tests.memory.walk import random_walk
from tests.memory.world import World
from tests.memory.world_size import WorldSize

WINDOW = Kind("window", 3)


def leave(world: World, seq_id: int, tokens: list[int], *, retain: bool = False) -> None:
    """Store a prompt and leave its blocks behind."""
    assert world.enter(seq_id, tokens)
    world.free(seq_id, retain=retain)


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
def test_the_hint_outweighs_every_policy(eviction: str) -> None:
    world = World(WorldSize(6, 1, eviction=eviction, retention=3), has_twin=eviction == "lru")
    leave(world, 1, [0, 0, 0], retain=True)
    for seq_id in (2, 3, 4):
        leave(world, seq_id, [1, seq_id % 2, 1])
    assert hit_length(world, [0] * 4) == 3
    # Without a choice, it goes.
    leave(world, 5, [1, 0, 0, 0, 0, 0])
    assert hit_length(world, [0] * 4) == 0


def test_beyond_the_limit_the_oldest_hint_goes_its_tail_first() -> None:
    world = World(WorldSize(4, 1, retention=3))
    leave(world, 1, [0, 0], retain=True)
    leave(world, 2, [1, 1], retain=True)
    assert len(list(world.manager.arena.retention.hints())) == 3
    world.enter(3, [0, 1])
    assert (hit_length(world, [0] * 3), hit_length(world, [1] * 3)) == (1, 2)


def test_a_hint_given_anew_is_young_again() -> None:
    world = World(WorldSize(8, 1, retention=2))
    leave(world, 1, [0, 1], retain=True)
    leave(world, 2, [1], retain=True)
    world.enter(3, [0, 0])
    world.free(3, retain=True)
    index = world.manager.groups[0].pool.index
    contents = [index.content_of(block_id) for _, block_id in world.manager.arena.retention.hints()]
    assert [content[0] for content in contents if content is not None] == [0, 0]


def test_a_hit_keeps_the_hint_and_a_block_that_is_rewritten_loses_it() -> None:
    world = World(WorldSize(4, 2, retention=4))
    leave(world, 1, [0, 0, 0, 0], retain=True)
    world.enter(2, [0, 0, 0, 0, 0])
    world.free(2)
    assert len(list(world.manager.arena.retention.hints())) == 2
    world.enter(3, [0, 0, 0, 0, 0])
    world.truncate(3, 3)
    # No room for a copy.
    world.enter(4, [1, 1, 1])
    assert world.grow(3, 1)
    assert len(list(world.manager.arena.retention.hints())) == 1


def test_hints_do_not_outlive_a_reset() -> None:
    world = World(WorldSize(4, 1, retention=4))
    leave(world, 1, [0, 0], retain=True)
    world.enter(2, [1, 1])
    world.free(2)
    world.reset()
    assert (world.manager.arena.retention.num_bytes, list(world.manager.arena.retention.hints())) == (0, [])
    world.enter(3, [0, 1, 0, 1])
    world.free(3, retain=True)
    assert len(list(world.manager.arena.retention.hints())) == 4


def test_slabs_without_hints_are_lent_first() -> None:
    world = World(WorldSize(3, 1, kinds=(Kind(), WINDOW), retention=3))
    leave(world, 1, [0], retain=True)
    leave(world, 2, [1])
    leave(world, 3, [1, 1])
    world.enter(4, [1, 0])
    assert hit_length(world, [0, 0]) == 1


@pytest.mark.parametrize("eviction", EVICTION_POLICIES)
@pytest.mark.parametrize("kinds", [(Kind(),), (Kind(), WINDOW)])
@pytest.mark.parametrize("seed", range(3))
def test_random_commands_with_hints_and_pins(eviction: str, kinds: tuple[Kind, ...], seed: int) -> None:
    size = WorldSize(6, 2, kinds=kinds, eviction=eviction, pins=2, retention=4)
    random_walk(World(size, has_twin=eviction == "lru"), random.Random(seed), 80)


@pytest.mark.parametrize("seed", range(6))
def test_random_commands_with_hints_on_slabs_of_several_blocks(seed: int) -> None:
    size = WorldSize(0, 1, kinds=(Kind(), WINDOW), layers=(1, 4), num_bytes=88, retention=4)
    random_walk(World(size, has_twin=False), random.Random(seed), 80)


@pytest.mark.parametrize("broken", ["bytes", "order", "unpublished", "first"])
def test_broken_books_are_noticed(broken: str) -> None:
    world = World(WorldSize(3, 1, kinds=(Kind(), WINDOW), retention=3), has_twin=False)
    leave(world, 1, [0, 1], retain=True)
    leave(world, 2, [1])
    arena = world.manager.arena
    retention, pool = arena.retention, arena.pools[0]
    block_id = next(iter(retention.of_group[0]))
    if broken == "bytes":
        retention.num_bytes += 1
    elif broken == "order":
        retention.of_group[0].discard(block_id)
    elif broken == "unpublished":
        retention.add(0, next(block_id for block_id in range(1, 7) if block_id not in pool.index))
    else:
        low, default, high = pool.idle.queues
        pool.idle.queues = (low, high, default)
    with pytest.raises(InvariantViolation, match="M1"):
        check(world.manager)


def test_without_a_limit_nothing_is_retained() -> None:
    world = World(WorldSize(4, 1))
    leave(world, 1, [0, 0], retain=True)
    assert list(world.manager.arena.retention.hints()) == []
    assert isinstance(world.manager.arena.retention, Retention)
