"""Colliding digests, made by hand: a collision is a miss, ends publishing, and never finds a wrong block."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quire.memory.prefix import token_chain as chain
from quire.memory.tables.tables import BlockTables
from tests.memory.media import laid_out, spans_of
from tests.memory.twin_pages import Kind
from tests.memory.world import NAMESPACES, World
from tests.memory.world_size import WorldSize

THE_SAME = b"the same"
KINDS = [(Kind(),), (Kind("window", 3),), (Kind("chunk", 6),), (Kind(), Kind("window", 3))]


@pytest.fixture(params=KINDS, ids=lambda kinds: " and ".join(kind.name for kind in kinds))
def colliding_first_blocks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> World:
    """Return a world in which the first blocks of all sequences have one digest, and all others their own."""
    world = World(WorldSize(8, 2, kinds=request.param), has_twin=False)
    root = world.manager.chain([], NAMESPACES[0]).root.digest
    honest = chain.block_digests

    def block_digests(parent: bytes, contents: Sequence[bytes]) -> list[bytes]:
        return [THE_SAME, *honest(THE_SAME, contents[1:])] if parent == root and contents else honest(parent, contents)

    monkeypatch.setattr(chain, "block_digests", block_digests)
    return world


def hit_length(world: World, tokens: list[int]) -> int:
    return world.manager.match_prefix(world.manager.chain(tokens, NAMESPACES[0])).num_tokens


def test_a_collision_is_a_miss(colliding_first_blocks: World) -> None:
    world = colliding_first_blocks
    world.enter(1, [0, 0, 1, 1])
    assert hit_length(world, [0, 0, 1, 1, 0]) == 4
    assert hit_length(world, [1, 0, 1, 1, 0]) == 0
    assert hit_length(world, [0, 1, 1, 1, 0]) == 1, "a part is found by its tokens, not by a digest"


@pytest.mark.parametrize("media", [[(0, 2, b"fox")], [(1, 1, b"fox")], [(0, 3, b"kite")], [(0, 2, b"kite")], []])
def test_equal_tokens_of_other_media_are_a_miss(
    colliding_first_blocks: World, media: list[tuple[int, int, bytes]]
) -> None:
    world = colliding_first_blocks
    world.enter(1, laid_out([0, 0, 1, 1], [(0, 3, b"fox")]))
    same = laid_out([0, 0, 1, 1, 0], [(0, 3, b"fox")])
    other = laid_out([0, 0, 1, 1, 0], media)
    lengths = [
        world.manager.match_prefix(world.manager.chain(tokens, NAMESPACES[0], spans_of(tokens))).num_tokens
        for tokens in (same, other)
    ]
    # Of the first block the fox of 3 tokens has 2: there, 2 tokens of it are the same.
    assert lengths == [4, 2 if media == [(0, 2, b"fox")] else 0]


def test_a_collision_is_a_miss_where_the_blocks_before_are_gone(colliding_first_blocks: World) -> None:
    """The last block's digest is the same for both prompts; in a window it is found without the first."""
    world = colliding_first_blocks
    world.enter(1, [0, 0, 1, 1, 0, 0, 1, 1])
    assert hit_length(world, [0, 0, 1, 1, 0, 0, 1, 1, 0]) == 8
    hit = world.manager.match_prefix(world.manager.chain([1, 1, 1, 1, 0, 0, 1, 1, 0], NAMESPACES[0]))
    assert not any(map(any, hit.block_ids)), "only what needs no block at all may be skipped"


def test_no_eviction_order_connects_a_child_to_another_parent(colliding_first_blocks: World) -> None:
    world = colliding_first_blocks
    world.enter(1, [0, 0, 1, 1, 0, 0])
    world.free(1)
    for idx, group in enumerate(world.manager.groups):  # a policy that evicts heads before tails
        world.evict(idx, group.pool.index.published(world.manager.chain([0, 0], NAMESPACES[0]), 0, 1)[0])
    world.enter(2, [0, 1])
    hit = world.manager.match_prefix(world.manager.chain([0, 1, 1, 1, 0, 0, 1], NAMESPACES[0]))
    used = {block_id for blocks in hit.block_ids for block_id in blocks if block_id}
    assert used <= {block_id for idx in range(len(world.size.kinds)) for block_id in world.manager.block_table(2, idx)}


def test_after_a_collision_a_sequence_publishes_no_more(colliding_first_blocks: World) -> None:
    world = colliding_first_blocks
    world.enter(1, [0, 0, 1, 1])
    world.enter(2, [0, 1, 1, 1])
    world.fork(2, 3, [0, 0])
    assert world.grow(3, 2)
    world.store(3, 2)
    for seq_id in (2, 3):
        world.free(seq_id)
    num_groups = len(world.size.kinds)
    published = [len(group.pool.index) for group in world.manager.groups]
    assert published == [2] * num_groups
    world.free(1)
    assert world.manager.usage().idle == 2 * num_groups


@pytest.mark.parametrize("colliding_first_blocks", [KINDS[0], KINDS[2]], indirect=True)
def test_what_continued_a_rewritten_block_does_not_continue_another(
    colliding_first_blocks: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = colliding_first_blocks
    world.enter(1, [0, 0, 1, 1])
    world.truncate(1, 1)
    monkeypatch.setattr(BlockTables, "_used_in_part", lambda *_: [])
    world.grow(1, 1)
    world.tokens[1].append(1)
    world.store(1, 1)
    # The first block was not kept, as if there were no room. Its place is remembered, since [1, 1] was computed after
    # [0, 0]; [0, 1] is found by the same digest, and so gets none.
    assert hit_length(world, [0, 1, 1, 1, 0]) == 0
    assert not world.manager.sequences[1].is_publishing
