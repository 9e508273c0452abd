"""Hits that end inside a block, published tails, and why a hit ends."""

from __future__ import annotations

import pytest

from quire.memory import (
    FullAttention,
    HitEnd,
    KVCacheManager,
    Namespace,
    PrefixHit,
    RecurrentState,
    TokenAccount,
    TokenSources,
    Verdict,
    check,
)
from quire.memory.groups.partial_block import MAX_CANDIDATES
from quire.memory.results import NO_TOKENS
from tests.memory.twin_pages import Kind
from tests.memory.world import NAMESPACES, World
from tests.memory.world_size import WorldSize

PUBLISHED = list(range(12))


def ask(world: World, tokens: list[int], namespace: Namespace = NAMESPACES[0]) -> PrefixHit:
    return world.manager.match_prefix(world.manager.chain(tokens, namespace))


def world_of(num_blocks: int, block_size: int = 4, kinds: tuple[Kind, ...] = (Kind(),)) -> World:
    """Return a world in which 12 tokens are published, of which nobody holds the blocks."""
    world = World(WorldSize(num_blocks, block_size, kinds=kinds))
    world.enter(1, PUBLISHED.copy())
    world.free(1)
    return world


# ---- parts of blocks ----


@pytest.mark.parametrize("kinds", [(Kind(),), (Kind(), Kind("window", 3)), (Kind(), Kind("chunk", 6))])
def test_a_hit_goes_on_into_a_block_as_far_as_tokens_agree(kinds: tuple[Kind, ...]) -> None:
    for num_common in range(1, 12):
        world = world_of(12, kinds=kinds)
        hit = ask(world, [*PUBLISHED[:num_common], *[99] * 9])
        assert (hit.num_tokens, hit.num_copied) == (num_common, num_common % 4)
        assert (hit.end, hit.differs_at) == (HitEnd.NOT_CACHED, num_common)
        assert world.enter(2, [*PUBLISHED[:num_common], *[99] * 9])
        assert world.manager.usage().num_copies == len(kinds) * (num_common % 4 > 0)
        assert ask(world, [*PUBLISHED, 99]).num_tokens == 12, "what was copied is still there"


def test_the_longest_common_block_is_used_and_of_equals_the_youngest() -> None:
    world = World(WorldSize(20, 4))
    for seq_id, tokens in enumerate(([0, 1, 2, 3], [0, 1, 1, 1], [0, 1, 1, 2], [0, 5, 5, 5])):
        world.enter(seq_id, tokens)
    assert ask(world, [0, 1, 2, 2, 2]).block_ids == (world.manager.block_table(0),)
    assert ask(world, [0, 1, 1, 7, 7]).block_ids == (world.manager.block_table(2),)
    assert ask(world, [0, 7, 7, 7, 7]).block_ids == (world.manager.block_table(3),)


def test_only_so_many_blocks_are_looked_at() -> None:
    world = World(WorldSize(MAX_CANDIDATES + 2, 2))
    world.enter(0, [1, 0])
    world.free(0)
    assert ask(world, [1, 1, 1]).num_tokens == 1
    for seq_id in range(1, MAX_CANDIDATES):
        world.enter(seq_id, [5 + seq_id, 0])
        world.free(seq_id)
    assert ask(world, [1, 1, 1]).num_tokens == 1
    world.enter(99, [3, 0])
    assert ask(world, [1, 1, 1]).num_tokens == 0
    assert ask(world, [1, 0, 1]).num_tokens == 2


def test_a_partial_hit_is_copied_before_its_source_is_evicted() -> None:
    world = world_of(5)
    world.enter(2, [*PUBLISHED[:6], 99])  # 2 blocks of 5 are not published
    (head, tail) = world.manager.block_table(2)
    assert world.grow(2, 12)
    assert ask(world, [*PUBLISHED, 99]).num_tokens == 4, "the source was taken, and its copy was made before"
    assert world.manager.block_table(2)[:2] == (head, tail)


def test_without_room_for_a_copy_the_block_is_written_in_place() -> None:
    world = world_of(3)
    hit = ask(world, [*PUBLISHED[:10], 99])
    assert world.manager.capacity.can_allocate(11, hit) == (Verdict.OK, 0, 0, 0)
    assert world.enter(2, [*PUBLISHED[:10], 99])
    assert world.manager.usage().num_copies == 0
    assert ask(world, [*PUBLISHED, 99]).num_tokens == 8


def test_a_copy_of_what_others_hold_needs_a_block() -> None:
    world = World(WorldSize(3, 4))
    world.enter(1, PUBLISHED.copy())
    hit = ask(world, [*PUBLISHED[:10], 99])
    assert world.manager.capacity.can_allocate(11, hit) == (Verdict.LATER, 0, 1, 0)
    world.enter(2, [*PUBLISHED[:10], 99])
    assert 2 not in world.tokens


def test_beside_a_state_no_block_is_used_in_part() -> None:
    state = RecurrentState(block_size=4, num_layers=1, layer_bytes=16)
    memory = KVCacheManager([FullAttention(block_size=4), state], 8)
    chain = memory.chain(PUBLISHED[:11], Namespace())
    memory.allocate(1, chain, memory.match_prefix(chain))
    for num_tokens in (8, 11):
        memory.append_slots((1,), memory.step_limit(1, num_tokens - memory.sequences[1].num_slots))
        memory.publish(1, num_tokens)
    memory.free(1)
    check(memory)
    assert memory.usage().idle == 2 + 1, "its tail is published"
    ends = [
        memory.match_prefix(memory.chain([*PUBLISHED[:9], *more], Namespace()))[:3:2]
        for more in ([], [9], [9, 10, 11], [99, 99, 99])
    ]
    assert ends == [(8, HitEnd.LAST_TOKEN), (8, HitEnd.LAST_TOKEN), (8, HitEnd.LAST_TOKEN), (8, HitEnd.LAST_TOKEN)]


# ---- tails ----


def test_the_next_turn_continues_the_tail_in_place() -> None:
    world = World(WorldSize(8, 4))
    world.enter(1, [0, 1, 2, 3, 4, 5])
    table = world.manager.block_table(1)
    world.free(1)
    assert world.manager.usage().idle == 2
    hit = ask(world, [0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert (hit.num_tokens, hit.block_ids, hit.end) == (6, (table,), HitEnd.NOT_CACHED)
    assert world.enter(2, [0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert world.manager.block_table(2)[:2] == table
    assert world.manager.usage().num_copies == 0
    world.free(2)
    assert world.manager.usage().idle == 3


def test_two_at_once_on_one_tail_share_it_until_they_write() -> None:
    world = World(WorldSize(8, 4))
    world.enter(1, [0, 1, 2, 3, 4, 5])
    world.free(1)
    for seq_id in (2, 3):
        assert world.open(seq_id, [0, 1, 2, 3, 4, 5, seq_id]).verdict is Verdict.OK
    assert world.manager.block_table(2) == world.manager.block_table(3)
    for seq_id in (2, 3):
        assert world.grow(seq_id, 1)
        world.store(seq_id, 1)
    assert world.manager.usage().num_copies == 1


def test_a_tail_covered_by_another_block_is_not_published() -> None:
    world = world_of(12)
    idle = world.manager.usage().idle
    for seq_id, tokens in enumerate((PUBLISHED[:10], [7, 7, 7], [7, 7], [7, 7, 7]), 10):
        world.enter(seq_id, tokens.copy())
        world.free(seq_id)
    assert world.manager.usage().idle == idle + 1
    world.enter(20, [7, 7, 8])
    world.free(20)
    assert world.manager.usage().idle == idle + 2


def test_of_forked_sequences_the_last_publishes_the_tail_they_share() -> None:
    world = World(WorldSize(8, 4))
    world.enter(1, [0, 1])
    world.fork(1, 2, [])
    world.free(1)
    assert world.manager.usage().idle == 0
    world.free(2)
    assert world.manager.usage().idle == 1


def test_no_tail_is_published_after_a_reset_or_a_failed_step() -> None:
    world = World(WorldSize(8, 4))
    for seq_id in (1, 2, 3):
        world.open(seq_id, [seq_id, 1, 2])
        world.grow(seq_id, 3)
    world.store(1, 3)
    world.store(2, 3)
    world.manager.free(2, is_sound=False)
    world.manager.free(3)
    world.manager.reset_prefix_cache()
    world.manager.free(1)
    assert world.manager.usage().idle == 0
    check(world.manager)


# ---- why a hit ends ----


def test_what_was_evicted_is_said_to_have_been() -> None:
    world = world_of(3)
    world.enter(2, [50] * 4)
    assert ask(world, [*PUBLISHED, 99]).end is HitEnd.EVICTED
    world.manager.reset_prefix_cache()
    assert ask(world, [*PUBLISHED, 99]).end is HitEnd.NOT_CACHED


def test_nothing_in_common_is_no_difference() -> None:
    world = world_of(8)
    assert ask(world, [77] * 9)[2:4] == (HitEnd.NOT_CACHED, None)
    assert ask(world, [*PUBLISHED, *[77] * 9]).end is HitEnd.NOT_CACHED


def test_another_namespace_looks_never_computed() -> None:
    """A client must not learn from the reason, or from the place of a difference, what another tenant sent."""
    world = world_of(8)
    known, unknown = (ask(world, prompt, NAMESPACES[1]) for prompt in ([*PUBLISHED, 99], [77] * 13))
    assert known == unknown
    assert (known.num_tokens, known.end, known.differs_at) == (0, HitEnd.NOT_CACHED, None)
    assert known.account(13).by_reason()["not_cached"] == 12


def test_there_are_five_reasons() -> None:
    assert [end.label for end in HitEnd] == ["not_cached", "evicted", "group", "limit", "last_token"]


def test_accounts_add_up() -> None:
    hits = [
        (PrefixHit(0, (), HitEnd.NOT_CACHED, None, 0), 9),
        (PrefixHit(6, (), HitEnd.LAST_TOKEN, None, 0, 2), 7),
        (PrefixHit(0, (), HitEnd.LIMIT, None, 0), 1),
    ]
    total = NO_TOKENS
    for hit, num_tokens in hits:
        account = hit.account(num_tokens)
        assert sum(account.sources) == num_tokens
        assert sum(account.reasons) == account.sources.computed
        assert total.plus(account).minus(total) == account
        total = total.plus(account)
    assert total.sources == TokenSources(device=4, copied=2, computed=11)
    assert {name: num for name, num in total.by_reason().items() if num} == {"not_cached": 8, "last_token": 3}
    assert total.minus(total) == NO_TOKENS == TokenAccount()


def test_memory_of_what_has_gone_is_bounded() -> None:
    """Of as many places as there are blocks; what went first is forgotten first."""
    world = World(WorldSize(4, 2), has_twin=False)
    for number in range(50):
        world.enter(number, [number, number, number, number])
        world.free(number)
        assert sum(node.length for node in world.manager.tree.nodes()) <= 4 + 4
        known = [n for n in range(number - 1) if ask(world, [n, n, n]).end is HitEnd.EVICTED]
        assert known == list(range(max(0, number - 3), number - 1))
    assert all(ask(world, [n, n, n]).end is HitEnd.NOT_CACHED for n in range(46))
