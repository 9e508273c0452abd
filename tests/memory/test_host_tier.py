"""The host tier, case by case: moves, verdicts and refusals."""

from __future__ import annotations

import pytest

from quire.errors import InvariantViolation
from quire.memory import BlockCopy, FullAttention, KVCacheManager, Namespace, SwapSize, Tier, TokenChain, Verdict, check
from quire.memory.prefix import token_chain

SIZE = 4
SPEC = FullAttention(block_size=SIZE)
OUT, BACK = (Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE)


def open_memory(num_blocks: int, num_host_blocks: int, *, num_groups: int = 1, watermark: int = 0) -> KVCacheManager:
    host_bytes = (num_host_blocks + 1) * SPEC.bytes_per_block if num_host_blocks else 0
    return KVCacheManager([SPEC] * num_groups, num_blocks, host_bytes=host_bytes, watermark=watermark)


def enter(memory: KVCacheManager, seq_id: int, tokens: list[int]) -> TokenChain:
    new = memory.chain(tokens, Namespace())
    hit = memory.match_prefix(new)
    memory.allocate(seq_id, new, hit)
    assert memory.append_slots((seq_id,), len(tokens) - hit.num_tokens)
    memory.publish(seq_id, len(tokens))
    return new


def test_M8_a_family_moves_each_block_once_and_comes_back_shared() -> None:
    memory = open_memory(8, 8)
    new = enter(memory, 1, list(range(10)))
    memory.fork(1, 2, new.tokens.copy())
    memory.take_table_deltas((1,))[0]
    assert memory.capacity.swap_size([1, 2]) == SwapSize(3, 3 * SPEC.bytes_per_block)
    memory.swap_out([1, 2])
    assert memory.take_ops().copies == tuple(BlockCopy(0, i, i, *OUT) for i in (1, 2, 3))
    assert memory.block_table(1) == ()
    assert memory.take_table_deltas((1,))[0] == ()
    usage = memory.usage()
    assert usage.host is not None
    assert (usage.used, usage.idle, usage.num_sequences, usage.num_tokens) == (0, 2, 2, 0)
    assert (usage.host.used, usage.host.num_sequences, usage.host.num_swap_outs) == (3, 2, 3)
    assert usage.host.used_bytes == 3 * SPEC.bytes_per_block
    memory.swap_in([1, 2])
    # Both full blocks are still published on the device: only the tail moves.
    (tail,) = memory.take_ops().copies
    assert (tail.src_id, tail[3:]) == (3, BACK)
    assert memory.block_table(1) == memory.block_table(2) == (1, 2, tail.dst_id)
    assert memory.take_table_deltas((1,))[0][0] == (0, 0, memory.block_table(1))
    check(memory)


def test_what_came_back_from_the_host_is_published_again() -> None:
    memory = open_memory(4, 8)
    enter(memory, 1, list(range(8)))
    memory.swap_out([1])
    enter(memory, 2, list(range(100, 116)))
    assert memory.match_prefix(memory.chain(list(range(9)), Namespace())).num_host_tokens == 8
    memory.free(2)
    memory.swap_in([1])
    hit = memory.match_prefix(memory.chain(list(range(9)), Namespace()))
    assert (hit.num_tokens, hit.num_host_tokens, hit.block_ids[0]) == (8, 0, memory.block_table(1))
    check(memory)


def test_a_block_is_demoted_before_it_is_taken_and_hit_on_the_host() -> None:
    memory = open_memory(2, 4)
    enter(memory, 1, list(range(8)))
    memory.free(1)
    enter(memory, 2, list(range(50, 54)))
    (demoted,) = memory.take_ops().copies
    assert demoted == BlockCopy(0, 2, 1, *OUT)
    memory.free(2)
    new = memory.chain(list(range(9)), Namespace())
    hit = memory.match_prefix(new)
    assert (hit.num_tokens, hit.num_host_tokens) == (8, 4)
    assert hit.block_ids == ((1, 0),)
    assert [tuple(load) for load in hit.loads] == [(0, 1, 1)]
    assert memory.capacity.can_allocate(8, hit)[2:] == (1, 1)
    memory.allocate(3, new, hit)
    # The other sequence's block goes down before what was hit comes up in its place.
    assert memory.take_ops().copies == (BlockCopy(0, 2, 2, *OUT), BlockCopy(0, 1, 2, *BACK))
    assert memory.block_table(3) == (1, 2)
    host = memory.usage().host
    assert host is not None
    assert (host.num_demotions, host.num_promotions, host.idle) == (2, 1, 2)
    check(memory)


def test_a_hit_on_the_host_without_room_on_the_device_is_refused() -> None:
    memory = open_memory(2, 4)
    enter(memory, 1, list(range(8)))
    memory.free(1)
    enter(memory, 2, list(range(50, 58)))
    new = memory.chain(list(range(9)), Namespace())
    hit = memory.match_prefix(new)
    assert memory.capacity.can_allocate(8, hit).verdict is Verdict.LATER
    with pytest.raises(ValueError, match=r"no room on the device: 2 blocks needed, 0 available"):
        memory.allocate(3, new, hit)
    assert 3 not in memory.sequences
    check(memory)


def test_a_reset_empties_the_host_tier_and_unpublishes_swapped_sequences() -> None:
    memory = open_memory(4, 4)
    enter(memory, 1, list(range(8)))
    memory.swap_out([1])
    memory.reset_prefix_cache()
    assert memory.match_prefix(memory.chain(list(range(9)), Namespace())).num_tokens == 0
    memory.swap_in([1])
    assert len(memory.take_ops().copies) == 4
    assert memory.match_prefix(memory.chain(list(range(9)), Namespace())).num_tokens == 0
    check(memory)


def test_a_second_swap_out_moves_only_what_the_host_has_not() -> None:
    memory = open_memory(4, 4)
    enter(memory, 1, list(range(9)))
    memory.swap_out([1])
    memory.swap_in([1])
    assert memory.capacity.swap_size([1]).num_blocks == 1
    memory.swap_out([1])
    memory.free(1)
    host = memory.usage().host
    assert host is not None
    assert (host.used, host.idle, host.num_sequences, host.num_swap_outs) == (0, 2, 0, 4)


def test_swap_out_says_later_never_and_why() -> None:
    memory = open_memory(8, 2)
    enter(memory, 1, list(range(8)))
    enter(memory, 2, list(range(20, 24)))
    enter(memory, 3, list(range(30, 42)))
    assert memory.capacity.can_swap_out([3]) == (Verdict.NEVER, 0, 3, 2)
    memory.swap_out([1])
    assert memory.capacity.can_swap_out([2]) == (Verdict.LATER, 0, 1, 0)
    with pytest.raises(ValueError, match="no room on the host: 1 blocks needed, 0 available"):
        memory.swap_out([2])
    memory.free(1)
    assert memory.capacity.can_swap_out([2]).verdict is Verdict.OK


def test_without_a_host_tier_nothing_is_swapped() -> None:
    memory = open_memory(4, 0, num_groups=2)
    enter(memory, 1, list(range(8)))
    assert memory.capacity.can_swap_out([1]) == (Verdict.NEVER, 0, 2, 0)
    assert memory.capacity.swap_size([1]) == SwapSize(0, 0)
    with pytest.raises(ValueError, match="no room on the host"):
        memory.swap_out([1])
    with pytest.raises(ValueError, match="sequence 1 is not swapped out"):
        memory.swap_in([1])
    assert memory.usage().host is None


def test_swap_in_keeps_the_watermark_for_others_and_nothing_when_alone() -> None:
    memory = open_memory(4, 4, watermark=1)
    enter(memory, 1, list(range(8)))
    memory.swap_out([1])
    enter(memory, 2, [90])
    assert memory.capacity.can_swap_in([1], [9]) == (Verdict.LATER, 0, 1, 0)
    assert memory.capacity.can_swap_in([1], [8], reserved=(1,)).verdict is Verdict.LATER
    assert memory.capacity.can_swap_in([1], [8]).verdict is Verdict.OK
    memory.free(2)
    assert memory.capacity.can_swap_in([1], [16], 1).verdict is Verdict.OK
    assert memory.capacity.can_swap_in([1], [17], 1) == (Verdict.NEVER, 0, 5, 4)


def test_mistakes_are_named() -> None:
    memory = open_memory(8, 8)
    enter(memory, 1, list(range(8)))
    with pytest.raises(ValueError, match=r"seq_ids must be distinct, got \[1, 1\]"):
        memory.swap_out([1, 1])
    memory.append_slots((1,), 1)
    with pytest.raises(ValueError, match="sequence 1 has 1 unwritten slots"):
        memory.capacity.can_swap_out([1])
    memory.truncate(1, 8)
    memory.swap_out([1])
    with pytest.raises(ValueError, match="sequence 1 is swapped out"):
        memory.append_slots((1,), 1)
    with pytest.raises(ValueError, match="needs a slab"):
        KVCacheManager([SPEC], 4, host_bytes=7)


def test_a_collision_with_what_is_swapped_out_costs_only_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = token_chain.block_digests
    monkeypatch.setattr(
        token_chain, "block_digests", lambda parent, contents: honest(parent, [b"whatever it holds" for _ in contents])
    )
    memory = open_memory(4, 4)
    enter(memory, 1, list(range(9)))
    memory.swap_out([1])
    enter(memory, 2, list(range(50, 58)))
    assert (memory.sequences[2].num_published, memory.sequences[2].is_publishing) == (0, False)
    memory.free(2)
    memory.swap_in([1])
    state = memory.sequences[1]
    assert (state.num_published, state.is_publishing) == (2, True)
    assert memory.match_prefix(memory.chain([*range(8), 0], Namespace())).num_tokens == 8
    check(memory)


def test_check_finds_a_sequence_on_both_tiers_and_one_that_is_not_counted() -> None:
    memory = open_memory(4, 4)
    enter(memory, 1, list(range(8)))
    memory.swap_out([1])
    assert memory.host is not None
    memory.host.num_sequences = 0
    with pytest.raises(InvariantViolation, match=r"M1.* 1 sequences are swapped out"):
        check(memory)
    memory.host.num_sequences = 1
    memory.groups[0].pool.retain([1])
    memory.sequences[1].tables[0] = [1]
    with pytest.raises(InvariantViolation, match=r"M2.* on both tiers"):
        check(memory)
