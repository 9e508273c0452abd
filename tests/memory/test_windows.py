"""Groups that free blocks while they run: windows and chunks, alone and with full attention."""

from __future__ import annotations

import pytest

from quire.memory import HitEnd, PrefixHit, Verdict
from quire.memory.pool.idle_blocks import RetentionPriority
from tests.memory.twin_pages import Kind
from tests.memory.world import NAMESPACES, World
from tests.memory.world_size import WorldSize

FULL, WINDOW, CHUNK = Kind(), Kind("window", 5), Kind("chunk", 8)


def ask(world: World, tokens: list[int]) -> PrefixHit:
    return world.manager.match_prefix(world.manager.chain(tokens, NAMESPACES[0]))


def decode(world: World, seq_id: int, tokens: list[int]) -> None:
    for token in tokens:
        assert world.grow(seq_id, 1)
        world.tokens[seq_id].append(token)
        world.store(seq_id, 1)


def test_blocks_left_of_the_window_are_null_and_go_back_at_once() -> None:
    world = World(WorldSize(20, 2, kinds=(FULL, WINDOW)))
    world.enter(1, list(range(6)))
    assert (world.manager.block_table(1, 0), world.manager.block_table(1, 1)) == ((1, 2, 3), (0, 5, 6))
    decode(world, 1, [6])
    assert world.manager.block_table(1, 1) == (0, 5, 6, 8), "token 3 is read by the query at 7"
    decode(world, 1, [7])
    assert world.manager.block_table(1, 1) == (0, 0, 6, 8)
    assert world.manager.block_table(1, 0) == (1, 2, 3, 7)
    usage = world.manager.usage()
    assert (usage.used, usage.idle) == (6, 2)


def test_a_chunk_longer_than_the_window_keeps_only_the_window() -> None:
    world = World(WorldSize(9, 2, kinds=(WINDOW,)))
    world.open(1, list(range(40)))
    for length in (12, 24, 36, 40):
        assert world.grow(1, length - world.num_slots(1))
        world.store(1, length - world.num_computed(1))
        assert world.manager.usage().used <= 3


def test_the_peak_of_a_long_prompt_depends_on_the_step() -> None:
    world = World(WorldSize(5, 2, kinds=(WINDOW,)))
    hit = ask(world, list(range(100)))
    can = world.manager.capacity.can_allocate
    assert can(100, hit) == (Verdict.LATER, 0, 50, 5)
    assert can(100, hit, 6) == (Verdict.LATER, 0, 6, 5)
    assert can(100, hit, 4) == (Verdict.OK, 0, 5, 5)
    assert World(WorldSize(2, 2, kinds=(WINDOW,))).manager.capacity.can_allocate(100, hit, 4) == (
        Verdict.NEVER,
        0,
        3,
        2,
    )
    assert world.manager.capacity.can_ever_hold(10**9)


def test_a_hit_needs_only_the_last_window() -> None:
    world = World(WorldSize(12, 2, kinds=(FULL, WINDOW)))
    world.enter(1, list(range(12)))
    world.free(1)
    for block_id in list(world.manager.groups[1].pool.idle)[:3]:
        world.evict(1, block_id)
    hit = ask(world, list(range(13)))
    assert (hit.num_tokens, hit.end, hit.group_idx) == (12, HitEnd.LAST_TOKEN, None)
    assert [block_id == 0 for block_id in hit.block_ids[1]] == [True] * 4 + [False] * 2
    assert 0 not in hit.block_ids[0]


def test_a_hit_says_which_group_ended_it() -> None:
    world = World(WorldSize(12, 2, kinds=(FULL, WINDOW)))
    world.enter(1, list(range(12)))
    hit = ask(world, [*range(10), 99, 99, 99])
    assert (hit.num_tokens, hit.end, hit.group_idx, hit.differs_at) == (10, HitEnd.NOT_CACHED, None, 10)
    world.manager.groups[1].pool.index.remove(hit.block_ids[1][-1:])
    hit = ask(world, [*range(10), 99, 99, 99])
    assert (hit.num_tokens, hit.end, hit.group_idx, hit.differs_at) == (8, HitEnd.GROUP, 1, None)


def test_a_hit_needs_blocks_inside_a_chunk_and_none_at_its_end() -> None:
    world = World(WorldSize(12, 2, kinds=(FULL, CHUNK)))
    world.enter(1, list(range(9)))
    assert ask(world, list(range(9))).block_ids == ((1, 2, 3, 4), (0, 0, 0, 0))
    assert ask(world, list(range(8))).block_ids == ((1, 2, 3, 4), (6, 7, 8, 9)), "the last is used in part"
    for block_id in (6, 7, 8):
        world.evict(1, block_id)
    assert ask(world, list(range(8))).num_tokens == 0
    assert ask(world, list(range(9))).num_tokens == 8


def test_a_prompt_needs_nothing_of_chunks_that_are_over() -> None:
    world = World(WorldSize(12, 2, kinds=(CHUNK,)))
    assert ask(world, list(range(21))).num_tokens == 0, "nobody has computed any of it"
    world.enter(1, list(range(16)))
    world.free(1)
    assert ask(world, list(range(21))).block_ids == ((0,) * 8,)
    world.reset()
    assert ask(world, list(range(21))).num_tokens == 0


def test_a_prompt_that_nobody_has_computed_lacks_no_snapshot() -> None:
    world = World(WorldSize(12, 2, kinds=(CHUNK, Kind("state"))))
    hit = ask(world, list(range(21)))
    assert (hit.num_tokens, hit.end) == (0, HitEnd.NOT_CACHED)


def test_the_next_turn_hits_blocks_outside_anothers_window() -> None:
    world = World(WorldSize(14, 1, kinds=(FULL, Kind("window", 3))))
    world.enter(1, [0, 0])
    world.enter(2, [0, 0, 0, 0])
    decode(world, 1, [0, 0])
    idle = world.manager.groups[1].pool.idle
    assert idle.queues[RetentionPriority.LOW]
    world.free(2)
    assert not idle.queues[RetentionPriority.LOW]


def test_truncate_goes_back_no_further_than_the_live_window() -> None:
    world = World(WorldSize(12, 2, kinds=(FULL, WINDOW)))
    world.enter(1, list(range(9)))
    assert world.manager.rollback.limit(1) == 8
    world.refuses(ValueError, lambda: world.manager.truncate(1, 7))
    world.truncate(1, 8)


def test_what_is_only_looked_ahead_kills_nothing() -> None:
    world = World(WorldSize(12, 2, kinds=(WINDOW,)))
    world.enter(1, list(range(5)))
    table = world.manager.block_table(1)
    assert world.manager.append_slots((1,), 1, lookahead=6)
    assert len(world.manager.block_table(1)) * 2 == 5 + 1 + 6
    assert world.manager.block_table(1)[: len(table)] == table
    world.manager.truncate(1, 5)
    assert world.manager.block_table(1) == table
    world.refuses(ValueError, lambda: world.manager.append_slots((1,), 1, -1))


def test_forks_bury_their_dead_apart() -> None:
    world = World(WorldSize(12, 2, kinds=(WINDOW,), caching=False))
    world.enter(1, list(range(5)))
    world.fork(1, 2, [])
    decode(world, 1, [5, 6, 7])
    assert world.manager.block_table(1)[:2] == (0, 0)
    assert 0 not in world.manager.block_table(2)


@pytest.mark.parametrize("kinds", [(WINDOW,), (CHUNK,), (FULL, WINDOW), (CHUNK, WINDOW)])
def test_the_twin_agrees_on_a_long_decode(kinds: tuple[Kind, ...]) -> None:
    world = World(WorldSize(20, 2, kinds=kinds))
    world.enter(1, [0, 1, 0])
    decode(world, 1, [0, 1] * 12)
    world.free(1)
    world.enter(2, [0, 1, 0] + [0, 1] * 12)
    world.free(2)
    assert world.manager.usage().used == 0


def test_an_alternative_draft_that_is_closed_leaves_the_order_of_eviction() -> None:
    """No turn follows on its tokens: what is out of the window of the sequence stays first to be evicted."""
    world = World(WorldSize(40, 2, kinds=(FULL, WINDOW)))
    world.enter(1, list(range(6)))
    queues = world.manager.groups[1].pool.idle.queues
    for token in range(6, 18):
        world.fork(1, 2, [token + 100])
        assert world.grow(2, 1)
        before = list(map(len, queues))
        world.free(2, is_sound=False)
        assert len(queues[RetentionPriority.LOW]) == before[RetentionPriority.LOW]
        decode(world, 1, [token])
    assert len(queues[RetentionPriority.LOW]) > 3
