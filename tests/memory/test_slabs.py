"""Slabs: arithmetic on the shapes of real models, and exact answers of a small arena."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.memory import FullAttention, KVCacheManager, SlidingWindow, Usage, Verdict
from quire.memory.pool.arena import Arena
from quire.memory.pool.idle_blocks import IdleBlocks
from quire.memory.pool.idle_queue import Ticker
from quire.memory.pool.pool import BlockPool
from quire.memory.pool.retention import Retention
from quire.memory.pool.slab_layout import MOST_ALIGNMENT_LOSS, SlabLayout, lay_out
from quire.memory.prefix.published import PublishedBlocks
from quire.memory.prefix.radix_tree import RadixTree
from quire.memory.specs import KVCacheSpec
from quire.memory.usage import used_fraction
from tests.memory.twin_pages import Kind
from tests.memory.walk import random_walk
from tests.memory.world import NAMESPACES, World
from tests.memory.world_size import WorldSize

KIB, GIB = 1 << 10, 1 << 30
N = 16


def kv(num_layers: int, num_kv_heads: int, head_dim: int) -> int:
    """Return the bytes of a block of 16 tokens in 16 bits."""
    return num_layers * N * 2 * num_kv_heads * head_dim * 2


# The bytes of a block in each group; a state is a block.
SHAPES = {
    "Gemma 3 1B": (kv(22, 1, 256), kv(4, 1, 256)),
    "Gemma 3 27B": (kv(52, 16, 128), kv(10, 16, 128)),
    "gpt-oss 20B": (kv(12, 8, 64), kv(12, 8, 64)),
    "LFM2 350M": (kv(6, 8, 64), 10 * 1024 * 2 * 2),
    "Granite 4 hybrid 350M": (kv(4, 4, 64), 28 * (48 * 32 * 128 * 4 + (1536 + 2 * 128) * 3 * 2)),
    "Falcon-H1 0.5B": (kv(36, 2, 64), 36 * (24 * 64 * 128 * 4 + (1536 + 2 * 128) * 3 * 2)),
    "Qwen3.5 0.8B": (kv(6, 2, 256), 18 * (16 * 128 * 128 * 4 + 3 * 16 * 128 * 3 * 2)),
    "Jamba 3B": (kv(4, 8, 128), 28 * (8192 * 16 * 4 + 8192 * 3 * 2)),
}


def total_loss(layout: SlabLayout, group_idx: int, num_bytes: int) -> float:
    """Return the share of the bytes that one group cannot have when it has every slab."""
    blocks = layout.num_slabs * layout.blocks_per_slab[group_idx]
    return 1 - blocks * layout.block_bytes[group_idx] / num_bytes


@pytest.mark.parametrize("name", SHAPES)
def test_little_is_lost_on_the_shapes_of_real_models(name: str) -> None:
    layout = lay_out(SHAPES[name], num_bytes=4 * GIB)
    for idx in range(len(layout.block_bytes)):
        assert layout.alignment_loss(idx) < 0.01
        assert total_loss(layout, idx, 4 * GIB) < 0.04


block_bytes = st.lists(st.integers(1, 60), min_size=1, max_size=4)


@given(block_bytes=block_bytes, num_slabs=st.integers(1, 9))
def test_every_block_of_a_slab_lies_inside_it(block_bytes: list[int], num_slabs: int) -> None:
    layout = lay_out(block_bytes, num_slabs=num_slabs)
    assert layout.first_byte >= max(block_bytes), "the null block belongs to no group"
    for idx, size in enumerate(block_bytes):
        assert layout.alignment_loss(idx) <= MOST_ALIGNMENT_LOSS + 1e-9
        for slab in range(num_slabs):
            start = layout.first_byte + slab * layout.slab_bytes
            blocks = layout.blocks_of(idx, slab)
            assert start <= blocks[0] * size
            assert (blocks[-1] + 1) * size <= start + layout.slab_bytes
            assert {layout.slab_of(idx, block_id) for block_id in blocks} == {slab}
            assert blocks[-1] < layout.num_ids(idx)


def test_one_group_has_a_slab_for_each_block() -> None:
    layout = lay_out([384], num_bytes=384 * 11 + 5)
    assert (layout.slab_bytes, layout.num_slabs, layout.blocks_per_slab) == (384, 10, (1,))
    assert KVCacheManager([FullAttention(block_size=4)], num_bytes=17 * 16).usage().num_blocks == 16


def test_an_arena_needs_a_size() -> None:
    with pytest.raises(ValueError, match="exactly one of num_bytes and num_slabs"):
        lay_out([4])
    with pytest.raises(ValueError, match="a slab of 6 bytes after the first 6, got 8 bytes"):
        lay_out([6, 6], num_bytes=8)
    with pytest.raises(ValueError, match="num_bytes must be set"):
        KVCacheManager([FullAttention(block_size=4), FullAttention(block_size=4, num_layers=2)], 4)


def pools_of(layout: SlabLayout) -> list[BlockPool]:
    tree, clock, retention = RadixTree(1, 2, None), Ticker(), Retention(layout, 0)
    return [
        BlockPool(PublishedBlocks(tree, idx, layout.num_ids(idx)), IdleBlocks(None, clock, retention, idx), (), clock)
        for idx in (0, 1)
    ]


@given(
    counts=st.lists(st.integers(0, 12), min_size=2, max_size=2),
    needs=st.lists(st.integers(0, 12), min_size=2, max_size=2),
)
def test_the_arena_promises_exactly_what_it_can_hold(counts: list[int], needs: list[int]) -> None:
    """It can hold what lies in slabs of one group each, however slabs are given to groups."""
    layout = lay_out([2, 6], num_slabs=4)
    arena = Arena(layout, pools_of(layout))
    totals = [count + need for count, need in zip(counts, needs, strict=False)]

    def fits(totals: list[int]) -> bool:
        return any(
            totals[0] <= slabs * layout.blocks_per_slab[0] and totals[1] <= (4 - slabs) * layout.blocks_per_slab[1]
            for slabs in range(5)
        )

    if not fits(counts):
        return
    for pool, count in zip(arena.pools, counts, strict=True):
        pool.take(count)
    assert arena.fits(needs) == fits(totals)
    assert all((needs[idx] <= arena.available_blocks(needs)[idx]) == fits(totals) for idx in (0, 1))
    if fits(totals):
        for pool, count, total in zip(arena.pools, needs, totals, strict=False):
            pool.take(count)
            assert pool.num_used == total


def test_what_lies_scattered_is_moved_together() -> None:
    layout = lay_out([2, 6], num_slabs=3)
    arena = Arena(layout, pools_of(layout))
    small, large = arena.pools
    blocks = small.take(9)
    small.release([block_id for i, block_id in enumerate(blocks) if i % 3])
    assert arena.free_slabs == [], "one block in each slab"
    assert arena.fits((0, 2))
    large.take(2)
    assert [move.group_idx for move in arena.moves] == [0, 0]
    kept = {move.src_id: move.dst_id for move in arena.moves}
    held = [kept.get(block_id, block_id) for block_id in blocks[::3]]
    assert {layout.slab_of(0, block_id) for block_id in held} & set(arena.group_slabs[1].slabs()) == set()
    assert not arena.fits((1, 0))


def test_the_oldest_idle_blocks_go_first_whoever_has_them() -> None:
    world = World(WorldSize(6, 2, kinds=(Kind(), Kind("window", 2))))
    world.enter(1, [0] * 8)
    world.free(1)
    usage = world.manager.usage()
    assert (usage.groups[0].idle, usage.groups[1].idle, usage.free) == (4, 4, 4)
    world.enter(2, [1] * 6)
    # The window's blocks died while the prompt was stored, before its sequence ended.
    assert [group.pool.num_evictions for group in world.manager.groups] == [0, 2]


SIZES = (((1, 3), 60), ((1, 4), 72), ((5, 2), 80), ((3, 3, 1), 90))


@pytest.mark.parametrize(("layers", "num_bytes"), SIZES)
@pytest.mark.parametrize("seed", range(12))
def test_groups_with_blocks_of_different_sizes_never_meet(layers: tuple[int, ...], num_bytes: int, seed: int) -> None:
    """Random commands; what is stored is kept byte by byte, so views that overlap would spoil each other."""
    rng = random.Random(seed)
    kinds = (Kind(), Kind("window", 3), Kind("chunk", 4))[: len(layers)]
    world = World(WorldSize(0, rng.choice((1, 2)), kinds=kinds, layers=layers, num_bytes=num_bytes), has_twin=False)
    random_walk(world, rng, 80)
    assert world.manager.usage().free == world.manager.usage().num_blocks - world.manager.usage().idle


def test_usage_is_told_by_group_and_in_bytes() -> None:
    specs: list[KVCacheSpec] = [
        FullAttention(block_size=2, num_layers=3),
        SlidingWindow(block_size=2, num_layers=1, window=2),
    ]
    manager = KVCacheManager(specs, num_bytes=1000)
    layout = manager.arena.layout
    usage = manager.usage()
    assert (usage.used_bytes, usage.lost_bytes, usage.num_bytes) == (0, 0, layout.num_slabs * layout.slab_bytes)
    for group, count in zip(manager.groups, (2, 1), strict=True):
        group.pool.take(count)
    usage = manager.usage()
    assert usage.used_bytes == 2 * 24 + 8
    assert [group.used for group in usage.groups] == [2, 1]
    assert used_fraction(manager.arena) == usage.used_fraction == usage.used_bytes / usage.num_bytes
    assert isinstance(usage, Usage)


@given(num_tokens=st.integers(1, 40), num_bytes=st.integers(48, 400), window=st.integers(1, 9))
def test_never_is_said_only_when_it_is_true(num_tokens: int, num_bytes: int, window: int) -> None:
    specs: list[KVCacheSpec] = [
        FullAttention(block_size=2, num_layers=1),
        SlidingWindow(block_size=2, num_layers=3, window=window),
    ]
    manager = KVCacheManager(specs, num_bytes=num_bytes)
    chain = manager.chain([0] * num_tokens, NAMESPACES[0])
    hit = manager.match_prefix(chain)
    status = manager.capacity.can_allocate(num_tokens, hit, 1)
    manager.allocate(1, chain, hit)
    grown = 0
    while grown < num_tokens and manager.append_slots((1,), 1):
        grown += 1
        manager.publish(1, grown)
    assert (status.verdict is Verdict.NEVER) == (grown < num_tokens)
    assert manager.capacity.can_ever_hold(num_tokens) == (grown == num_tokens)


@pytest.mark.parametrize(("taken", "needs"), list(product(range(4), range(4))))
def test_one_group_counts_blocks(taken: int, needs: int) -> None:
    manager = KVCacheManager([FullAttention(block_size=2)], 3)
    manager.groups[0].pool.take(taken)
    assert manager.arena.fits((needs,)) == (taken + needs <= 3)
