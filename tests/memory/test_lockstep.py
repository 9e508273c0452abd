"""Sequences that advance in lockstep: all get slots or none, and never more than was computed beforehand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.memory import (
    ChunkedLocal,
    FullAttention,
    KVCacheManager,
    KVCacheSpec,
    Namespace,
    RecurrentState,
    SlidingWindow,
    check,
)

SIZE = 4
FULL = FullAttention(block_size=SIZE)
WIDE = FullAttention(block_size=SIZE, num_layers=3)
WINDOW = SlidingWindow(block_size=SIZE, window=7)
CHUNKED = ChunkedLocal(block_size=SIZE, chunk=10)
STATE = RecurrentState(block_size=SIZE, layer_bytes=FULL.bytes_per_block)


def memory_of(specs: tuple[KVCacheSpec, ...], num_blocks: int, **options: int | bool) -> KVCacheManager:
    # Several groups: blocks of the first.
    num_bytes = None if len(specs) == 1 else (num_blocks + 1) * max(spec.bytes_per_block for spec in specs)
    return KVCacheManager(specs, num_blocks if num_bytes is None else None, num_bytes=num_bytes, **options)  # type: ignore[arg-type]


def fork_and_append(memory: KVCacheManager, num_prompt: int, num_tokens: int, width: int) -> bool:
    """Grow sequences that part behind their prompt to a length, all in the same steps; say whether they got there."""
    prompt = [0] * num_prompt
    chain = memory.chain(prompt, Namespace())
    # Without a hit: behind a whole chunk one may need no block.
    memory.allocate(0, chain, memory.match_prefix(chain, 0))
    while memory.sequences[0].num_slots < num_prompt:
        if not memory.append_slots((0,), 1):
            return False
        memory.publish(0, memory.sequences[0].num_slots)
    chains = [chain, *(memory.fork(0, seq_id, prompt.copy()) for seq_id in range(1, width))]
    for _ in range(num_tokens - num_prompt):
        if not memory.append_slots(range(width), atomic=True):
            return False
        check(memory)
        for seq_id, own in enumerate(chains):
            own.tokens.append(seq_id + 1)
            memory.publish(seq_id, len(own.tokens))
            memory.take_table_deltas((seq_id,))[0]
        memory.take_ops()
    return True


@settings(max_examples=150)
@given(
    specs=st.sampled_from([(FULL,), (WINDOW,), (CHUNKED,), (STATE,), (FULL, WINDOW), (WIDE, STATE), (CHUNKED, FULL)]),
    num_prompt=st.integers(1, 30),
    num_more=st.integers(1, 20),
    width=st.integers(1, 5),
    caching=st.booleans(),
)
def test_the_peak_of_a_lockstep_group_is_computed_exactly(
    specs: tuple[KVCacheSpec, ...], num_prompt: int, num_more: int, width: int, caching: bool
) -> None:
    """In the least memory that is said to hold it, it gets there; in less, it does not."""
    num_tokens = num_prompt + num_more

    def fits(memory: KVCacheManager) -> bool:
        return memory.capacity.can_ever_hold(num_tokens, width=width, num_shared=num_prompt)

    for num_blocks in range(1, 200):
        memory = memory_of(specs, num_blocks, enable_prefix_caching=caching, snapshot_interval=2 * SIZE)
        is_computed = fits(memory)
        assert fork_and_append(memory, num_prompt, num_tokens, width) == is_computed
        if is_computed:
            break


def test_a_lockstep_group_that_lacks_one_block_gets_none() -> None:
    memory = memory_of((FULL,), 4)
    chain = memory.chain([1, 2, 3, 4, 5, 6], Namespace())
    memory.allocate(0, chain, memory.match_prefix(chain))
    assert memory.append_slots((0,), 6)
    memory.publish(0, 6)
    for seq_id in (1, 2, 3):
        memory.fork(0, seq_id, chain.tokens.copy())
    # Of four that write to one block, three need a copy, and two blocks are free.
    before = memory.usage()
    assert not memory.append_slots([0, 1, 2, 3], atomic=True)
    assert memory.usage() == before
    assert [memory.sequences[seq_id].num_slots for seq_id in range(4)] == [6] * 4
    memory.free(3)
    assert memory.append_slots([0, 1, 2], atomic=True)
    assert memory.usage().num_copies == 2


def test_sequences_outside_the_group_keep_their_share() -> None:
    """A holder from outside the group: then even the last of the group needs a copy."""
    memory = memory_of((FULL,), 3)
    chain = memory.chain([1, 2], Namespace())
    memory.allocate(0, chain, memory.match_prefix(chain))
    assert memory.append_slots((0,), 2)
    memory.publish(0, 2)
    for seq_id in (1, 2):
        memory.fork(0, seq_id, chain.tokens.copy())
    assert memory.append_slots([1, 2], atomic=True)
    assert memory.usage().num_copies == 2


def test_what_is_published_is_copied_only_where_all_have_room() -> None:
    """At a snapshot each state is copied where there is room for all; where there is not, all are written in place."""
    for num_blocks, num_copies in ((8, 2), (2, 0)):
        memory = memory_of((STATE,), num_blocks, snapshot_interval=SIZE)
        chains = []
        for seq_id in (0, 1):
            chain = memory.chain([seq_id] * SIZE, Namespace())
            memory.allocate(seq_id, chain, memory.match_prefix(chain))
            assert memory.append_slots((seq_id,), SIZE)
            memory.publish(seq_id, SIZE)
            chains.append(chain)
        assert memory.append_slots([0, 1], atomic=True)
        assert memory.usage().num_copies == num_copies
        check(memory)


@pytest.mark.parametrize("width", [2, 3])
def test_a_swapped_sequence_is_refused(width: int) -> None:
    memory = KVCacheManager((FULL,), 8, host_bytes=9 * FULL.bytes_per_block)
    for seq_id in range(width):
        chain = memory.chain([seq_id], Namespace())
        memory.allocate(seq_id, chain, memory.match_prefix(chain))
        assert memory.append_slots((seq_id,), 1)
        memory.publish(seq_id, 1)
    memory.swap_out([0])
    before = memory.usage()
    with pytest.raises(ValueError, match="swapped out"):
        memory.append_slots(range(width), atomic=True)
    assert memory.usage() == before
