"""Sizing without an engine: published shapes by hand, and the manager's own answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import CACHE_DTYPES
from quire.memory import (
    ChunkedLocal,
    FullAttention,
    KVCacheManager,
    KVCacheSpec,
    Namespace,
    RecurrentState,
    SlidingWindow,
)
from quire.memory.capacity.sizing import ArenaSizing, arena_bytes, most_bytes, sequence_bytes

KIB, MIB = 1 << 10, 1 << 20
# Layers, KV heads, head dim -> bytes of a token in 16 bits, worked out by hand.
SHAPES = {
    "Llama 2 7B": (32, 32, 128, 512 * KIB),
    "Llama 3.1 8B": (32, 8, 128, 128 * KIB),
    "Llama 3.1 70B": (80, 8, 128, 320 * KIB),
    "Qwen2.5 7B": (28, 4, 128, 56 * KIB),
    "Qwen3 0.6B": (28, 8, 128, 112 * KIB),
    "Qwen3 8B": (36, 8, 128, 144 * KIB),
    "Qwen3 32B": (64, 8, 128, 256 * KIB),
    "Mistral 7B": (32, 8, 128, 128 * KIB),
    "Phi-3 mini": (32, 32, 96, 384 * KIB),
    "Gemma 2 9B": (42, 8, 256, 336 * KIB),
    "Mixtral 8x7B": (32, 8, 128, 128 * KIB),
}


@pytest.mark.parametrize("name", SHAPES)
def test_bytes_of_published_shapes(name: str) -> None:
    layers, heads, head_dim, token = SHAPES[name]

    def block(dtype: str) -> int:
        element_bytes, scale_bytes = CACHE_DTYPES[dtype]
        return FullAttention(
            block_size=16,
            num_layers=layers,
            num_kv_heads=heads,
            head_dim=head_dim,
            element_bytes=element_bytes,
            scale_bytes=scale_bytes,
        ).bytes_per_block

    assert block("bfloat16") == block("float16") == 16 * token
    assert block("float32") == 32 * token
    assert block("fp8") == 8 * token
    # Four bytes of scale for K and four for V, in each of the layers and heads.
    assert block("int8") == 8 * token + 16 * layers * heads * 8


def test_a_scale_is_counted_in_every_kind() -> None:
    shape = {"block_size": 4, "num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "element_bytes": 1, "scale_bytes": 4}
    specs = (FullAttention(**shape), SlidingWindow(window=9, **shape), ChunkedLocal(chunk=9, **shape))
    assert [spec.bytes_per_block for spec in specs] == [4 * 3 * 2 * 2 * (8 + 4)] * 3


def test_one_group_is_blocks_and_the_null_block() -> None:
    spec = FullAttention(block_size=16, num_layers=32, num_kv_heads=8, head_dim=128)
    sizing = ArenaSizing.of([spec], arena_bytes([spec], 100))
    assert sizing.num_bytes == 101 * 2 * MIB
    assert sizing.num_blocks == (100,)
    assert sizing.longest(10_000) == 1600
    assert [sizing.concurrency(length) for length in (16, 17, 800, 801, 1600, 1601)] == [100, 50, 2, 1, 1, 0]
    assert sizing.shortage(1600) is None
    assert sizing.shortage(1601) == (0, 101, 100)
    assert sizing.bytes_for(1601) == 102 * 2 * MIB
    # A byte less than a block less.
    assert ArenaSizing.of([spec], 101 * 2 * MIB - 1).num_blocks == (99,)


def test_nothing_fits_into_nothing() -> None:
    spec = FullAttention(block_size=16)
    sizing = ArenaSizing.of([spec], 0)
    assert (sizing.num_bytes, sizing.num_blocks, sizing.longest(99), sizing.concurrency(1)) == (0, (0,), 0, 0)
    assert sizing.shortage(1) == (0, 1, 0)


def test_a_window_holds_no_more_than_itself() -> None:
    """Gemma 3 27B: 52 layers of 1,024 tokens, and 10 of all; 131,072 tokens."""
    shape = {"block_size": 16, "num_kv_heads": 16, "head_dim": 128}
    window, full = SlidingWindow(window=1024, num_layers=52, **shape), FullAttention(num_layers=10, **shape)
    # 1,023 tokens before it and its own touch at most 65 blocks of 6.5 MiB; 8,192 blocks of 1.25 MiB.
    held = 65 * 6656 * KIB + 8192 * 1280 * KIB
    assert sequence_bytes([window, full], 131_072) == held
    sizing = ArenaSizing.of([window, full], 64 * held)
    assert 61 <= sizing.concurrency(131_072) <= 64


def test_a_state_is_one_block_of_its_group() -> None:
    full = FullAttention(block_size=16, num_layers=2, num_kv_heads=2, head_dim=64)
    state = RecurrentState(block_size=16, num_layers=3, layer_bytes=full.bytes_per_block)
    assert state.bytes_per_block == 3 * 16 * KIB
    assert sequence_bytes([full, state], 33) == (3 + 3) * 16 * KIB
    # Slabs of three blocks or one state: 10 states and their 10 blocks in 4 slabs.
    sizing = ArenaSizing.of([full, state], 48 * KIB * (1 + 14))
    assert sizing.layout.blocks_per_slab == (3, 1)
    assert sizing.concurrency(16) == 10
    assert sizing.concurrency(16 * 39) == 1
    assert sizing.longest(9999) == 16 * 39
    assert sizing.shortage(16 * 39 + 1) == (0, 15, 14)
    # Where a state is more than the blocks beside it, it is named.
    assert ArenaSizing.of([full, state], 48 * KIB * 2).shortage(1) == (1, 2, 1)


def test_the_most_that_seats_can_fill() -> None:
    full = FullAttention(block_size=16, num_layers=2, num_kv_heads=2, head_dim=64)
    state = RecurrentState(block_size=16, num_layers=3, layer_bytes=full.bytes_per_block)
    assert most_bytes([full], 100, 5) is None
    # Three seats of 7 blocks fill 7 slabs of three; each has a state and a snapshot close to its prompt's end.
    assert most_bytes([full, state], 100, 3) == 48 * KIB * (1 + 7 + 3 * 2)
    # And one each 32 tokens.
    assert most_bytes([full, state], 100, 3, 32) == 48 * KIB * (1 + 7 + 3 * (2 + 3))


def test_groups_that_need_most_at_different_moments() -> None:
    """Two blocks of a chunk, or three of a window, but never five at once: four slabs hold one sequence."""
    specs: list[KVCacheSpec] = [ChunkedLocal(block_size=1, chunk=2), SlidingWindow(block_size=1, window=3)]
    sizing = ArenaSizing.of(specs, ArenaSizing.of(specs, 0).layout._replace(num_slabs=4).num_bytes)
    assert [spec.peak_blocks(3, 1) for spec in specs] == [2, 3]
    assert sizing.concurrency(3) == 1
    assert decode_together(specs, sizing.num_bytes, 1, 3)


def specs() -> st.SearchStrategy[list[KVCacheSpec]]:
    """Draw up to three groups of small blocks of one block size."""

    def groups(size: int) -> st.SearchStrategy[list[KVCacheSpec]]:
        layers = st.integers(1, 4)
        kinds = st.one_of(
            st.builds(FullAttention, block_size=st.just(size), num_layers=layers),
            st.builds(SlidingWindow, block_size=st.just(size), num_layers=layers, window=st.integers(1, 9)),
            st.builds(ChunkedLocal, block_size=st.just(size), num_layers=layers, chunk=st.integers(1, 9)),
        )
        return st.lists(kinds, min_size=1, max_size=3)

    return st.integers(1, 4).flatmap(groups)


@given(specs=specs(), num_slabs=st.integers(1, 12))
def test_the_manager_gives_the_same_answers(specs: list[KVCacheSpec], num_slabs: int) -> None:
    num_bytes = ArenaSizing.of(specs, 0).layout._replace(num_slabs=num_slabs).num_bytes
    memory = KVCacheManager(specs, num_bytes=num_bytes, enable_prefix_caching=False)
    sizing = ArenaSizing.of(specs, num_bytes)
    assert sizing.layout == memory.arena.layout
    held = [memory.capacity.can_ever_hold(length) for length in range(1, 60)]
    assert [sizing.shortage(length) is None for length in range(1, 60)] == held
    assert sizing.longest(59) == sum(held)
    for length in (1, 5, 12, 30):
        needed = sizing.bytes_for(length)
        assert KVCacheManager(specs, num_bytes=needed).capacity.can_ever_hold(length)
        if sizing.layout._replace(num_slabs=1).num_bytes < needed:
            less = KVCacheManager(specs, num_bytes=needed - 1)
            assert not less.capacity.can_ever_hold(length)


@given(specs=specs(), num_slabs=st.integers(1, 12), length=st.integers(1, 24))
def test_so_many_sequences_do_fit_at_once(specs: list[KVCacheSpec], num_slabs: int, length: int) -> None:
    num_bytes = ArenaSizing.of(specs, 0).layout._replace(num_slabs=num_slabs).num_bytes
    at_once = ArenaSizing.of(specs, num_bytes).concurrency(length)
    assert decode_together(specs, num_bytes, at_once, length)
    if all(isinstance(spec, FullAttention) for spec in specs):
        assert not decode_together(specs, num_bytes, at_once + 1, length)


def decode_together(specs: list[KVCacheSpec], num_bytes: int, count: int, length: int) -> bool:
    """Tell whether a number of sequences grow to a length side by side, a token a step."""
    memory = KVCacheManager(specs, num_bytes=num_bytes, enable_prefix_caching=False)
    tokens = [list(range(length)) for _ in range(count)]
    for seq_id in range(count):
        chain = memory.chain(tokens[seq_id], Namespace())
        memory.allocate(seq_id, chain, memory.match_prefix(chain))
    for step in range(length):
        for seq_id in range(count):
            if not memory.append_slots((seq_id,), 1):
                return False
            memory.publish(seq_id, step + 1)
    return True
