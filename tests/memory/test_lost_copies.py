"""Copies that were handed out and never made: the holders of their targets, and what may still be hit."""

from __future__ import annotations

import pytest

from quire.memory import BlockCopy, FullAttention, KVCacheManager, MemoryOps, Namespace, SlidingWindow, Tier, check
from quire.memory.invariants import snapshot

FULL = FullAttention(block_size=2)


def enter(memory: KVCacheManager, seq_id: int, tokens: list[int]) -> None:
    chain = memory.chain(tokens, Namespace())
    memory.allocate(seq_id, chain, memory.match_prefix(chain))
    memory.append_slots((seq_id,), len(tokens) - memory.sequences[seq_id].num_slots)
    memory.publish(seq_id, len(tokens))


def num_hit(memory: KVCacheManager, tokens: list[int]) -> int:
    return memory.match_prefix(memory.chain(tokens, Namespace())).num_tokens


def demoted() -> tuple[KVCacheManager, MemoryOps]:
    """Return memory in which a prompt went to the host in a step, which held nothing else."""
    memory = KVCacheManager([FULL], 4, host_bytes=5 * FULL.bytes_per_block)
    enter(memory, 1, [1] * 8)
    memory.free(1)
    enter(memory, 2, [2] * 8)
    return memory, memory.take_ops()


def test_what_was_demoted_cannot_be_hit() -> None:
    memory, ops = demoted()
    assert {(copy.src_tier, copy.dst_tier) for copy in ops.copies} == {(Tier.DEVICE, Tier.HOST)}
    assert num_hit(memory, [1] * 9) == 8
    assert memory.lost_copies.holders_of(ops) == ((), ())
    memory.lost_copies.discard(ops)
    check(memory)
    assert (num_hit(memory, [1] * 9), num_hit(memory, [2] * 9)) == (0, 8)
    usage = memory.usage()
    assert usage.host is not None
    assert (usage.host.idle, usage.host.free, usage.host.num_evictions) == (0, 4, 0)


def test_swapped_sequences_are_named_until_they_are_freed() -> None:
    memory = KVCacheManager([FULL], 6, host_bytes=8 * FULL.bytes_per_block)
    enter(memory, 1, [1] * 5)
    enter(memory, 2, [2] * 4)
    memory.swap_out([1])
    ops = memory.take_ops()
    assert memory.lost_copies.holders_of(ops) == ((1,), ())
    before = snapshot(memory)
    with pytest.raises(ValueError, match="must have no holders"):
        memory.lost_copies.discard(ops)
    assert snapshot(memory) == before
    memory.free(1, is_sound=False)
    memory.lost_copies.discard(ops)
    check(memory)
    assert num_hit(memory, [1] * 6) == 4, "what the device has was not touched"
    assert memory.usage().num_sequences == 1


def test_a_pin_that_holds_a_target_is_named() -> None:
    """Used blocks of a group are moved together where another group lacks a slab, pinned ones too."""
    memory = KVCacheManager([FULL], 6, pin_limit=2)
    enter(memory, 1, [1] * 5)
    assert memory.pin("pinned", memory.chain([1] * 5, Namespace())) == 4
    memory.free(1)
    ops = MemoryOps((BlockCopy(0, 6, memory.pins.blocks_of("pinned", 0)[0]),))
    assert memory.lost_copies.holders_of(ops) == ((), ("pinned",))
    memory.unpin("pinned")
    memory.lost_copies.discard(ops)
    check(memory)
    assert num_hit(memory, [1] * 6) == 0


@pytest.mark.parametrize("layers", [1, 4])
def test_slabs_of_which_nothing_is_left_go_back(layers: int) -> None:
    window = SlidingWindow(block_size=2, window=9, num_layers=layers)
    memory = KVCacheManager([FULL, window], num_bytes=9 * window.bytes_per_block + 8 * FULL.bytes_per_block)
    enter(memory, 1, [1] * 4)
    tables = [memory.block_table(1, idx) for idx in (0, 1)]
    memory.free(1)
    num_free = len(memory.arena.free_slabs)
    memory.lost_copies.discard(MemoryOps((BlockCopy(0, 9, tables[0][0]), BlockCopy(1, 9, tables[1][0]))))
    check(memory)
    memory.lost_copies.discard(MemoryOps((BlockCopy(0, 9, tables[0][1]), BlockCopy(1, 9, tables[1][1]))))
    check(memory)
    assert len(memory.arena.free_slabs) == memory.arena.layout.num_slabs > num_free
