"""Media in blocks: hits, the reasons of their ends, tails, and saves to disk."""

from __future__ import annotations

import pytest

from quire.errors import InvariantViolation
from quire.memory import FullAttention, HitEnd, KVCacheManager, MediaSpan, Namespace, PrefixHit, check

SIZE = 4
TOKENS = list(range(16))
# From the second half of the first block to the first half of the third.
FOX = MediaSpan(2, 8, b"fox")


def enter(memory: KVCacheManager, tokens: list[int], *media: MediaSpan, tenant: str | None = None) -> PrefixHit:
    """Open a sequence, compute all its tokens and free it; return its hit."""
    chain = memory.chain(list(tokens), Namespace(tenant=tenant), media)
    hit = memory.match_prefix(chain)
    memory.allocate(1, chain, hit)
    assert memory.append_slots((1,), len(tokens) - hit.num_tokens)
    memory.publish(1, len(tokens))
    memory.free(1)
    check(memory)
    return hit


def ask(memory: KVCacheManager, tokens: list[int], *media: MediaSpan) -> PrefixHit:
    return memory.match_prefix(memory.chain(list(tokens), Namespace(), media))


@pytest.fixture
def memory() -> KVCacheManager:
    """Return a manager to which the fox is known, and 2 tokens more than three blocks."""
    memory = KVCacheManager([FullAttention(block_size=SIZE)], num_blocks=40, key=b"key")
    enter(memory, TOKENS[:14], FOX)
    return memory


def test_the_same_media_in_the_same_place_are_hit_to_the_last_token(memory: KVCacheManager) -> None:
    hit = ask(memory, TOKENS, FOX)
    # The tail has no media of its own: it is used in part as any other.
    assert (hit.num_tokens, hit.num_copied, hit.end) == (14, 2, HitEnd.NOT_CACHED)


@pytest.mark.parametrize(
    ("media", "num_tokens"),
    [
        ((), 0),
        ((FOX._replace(digest=b"kite"),), 0),
        ((FOX._replace(start=1),), 0),
        ((FOX._replace(start=3),), 0),
        ((FOX._replace(num_tokens=9),), 8),
        ((FOX._replace(num_tokens=5),), 4),
        ((FOX, MediaSpan(10, 1, b"kite")), 8),
        ((FOX, MediaSpan(12, 1, b"kite")), 12),
        ((FOX, MediaSpan(14, 1, b"kite")), 12),
    ],
)
def test_other_media_end_a_hit_at_the_block_that_they_touch(
    memory: KVCacheManager, media: tuple[MediaSpan, ...], num_tokens: int
) -> None:
    hit = ask(memory, TOKENS, *media)
    assert (hit.num_tokens, hit.num_copied) == (num_tokens, 0)
    assert hit.end is HitEnd.NOT_CACHED
    assert hit.differs_at == (num_tokens or None)
    assert enter(memory, TOKENS, *media).num_tokens == num_tokens
    assert ask(memory, [*TOKENS, 0], *media).num_tokens == 16
    assert ask(memory, TOKENS, FOX).num_tokens == 14


def test_plain_tokens_never_hit_a_part_of_media(memory: KVCacheManager) -> None:
    assert ask(memory, TOKENS[:3]).num_tokens == 0
    assert ask(memory, [0, 1, 9, 9]).num_tokens == 0, "not even the tokens before them"
    enter(memory, [0, 1, 9, 9])
    assert ask(memory, [0, 1, 9, 8]).num_tokens == 3


@pytest.mark.parametrize(("num_tokens", "num_new", "known"), [(18, 5, 17), (17, 5, 16), (16, 4, 15), (15, 3, 12)])
def test_what_stands_for_media_is_no_tail(memory: KVCacheManager, num_tokens: int, num_new: int, known: int) -> None:
    """A prompt that ends with a whole block is found to its last token, as others are."""
    tokens, media = [5, *TOKENS, 5][:num_tokens], MediaSpan(13, 2, b"kite")
    before = memory.usage().idle
    enter(memory, tokens, media)
    assert memory.usage().idle - before == num_new
    hit = ask(memory, tokens, media)
    assert hit.num_tokens == known
    assert hit.end is (HitEnd.NOT_CACHED if num_tokens == 15 else HitEnd.LAST_TOKEN)
    assert enter(memory, tokens, media).num_tokens == known
    assert memory.usage().idle - before == num_new


def test_another_tenant_s_media_are_known_to_the_operator_only(memory: KVCacheManager) -> None:
    hit = enter(memory, TOKENS, FOX, tenant="acme")
    assert (hit.num_tokens, hit.end) == (0, HitEnd.NOT_CACHED)
    other = enter(memory, TOKENS, FOX._replace(digest=b"kite"), tenant="zeta")
    assert other.end is HitEnd.NOT_CACHED


def test_blocks_of_media_go_to_the_host_and_to_disk() -> None:
    specs = [FullAttention(block_size=SIZE)]
    memory = KVCacheManager(specs, 4, host_bytes=9 * specs[0].bytes_per_block, has_disk=True)
    enter(memory, TOKENS, FOX)
    enter(memory, [99] * 16)
    assert memory.archive is not None
    hit = ask(memory, [*TOKENS, 0], FOX)
    assert (hit.num_tokens, hit.num_host_tokens) == (16, 16)
    assert ask(memory, [*TOKENS, 0]).num_tokens == 0
    saves = set(memory.archive.saving_ops().saves)
    chain = memory.chain(TOKENS, Namespace(), [FOX])
    contents = [chain.content(block_idx) for block_idx in range(4)]
    assert {*zip(chain.digests(4), contents, strict=True)} <= {(save.digest, save.tokens) for save in saves}
    assert [len(content) > 4 * SIZE for content in contents] == [True, True, True, False]
    # After a restart, only the same media in the same places are to be loaded.
    empty = KVCacheManager(specs, 8, host_bytes=9 * specs[0].bytes_per_block, has_disk=True)
    assert empty.archive is not None
    for media, num_blocks in (((FOX,), 4), ((), 0), ((FOX._replace(num_tokens=4),), 1), ((FOX._replace(start=3),), 0)):
        plan = empty.archive.find_loads(empty.chain([*TOKENS, 0], Namespace(), media), saves.__contains__)
        assert len(plan.loads) == plan.num_blocks == num_blocks


@pytest.mark.parametrize("entries", [b"m", MediaSpan(4, 1, b"x").entry(0, 8), MediaSpan(-2, 2, b"x").entry(0, 4)])
def test_the_check_reads_what_blocks_keep_of_media(memory: KVCacheManager, entries: bytes) -> None:
    (pool,) = (group.pool for group in memory.groups)
    (last,) = [block_id for block_id in pool.index.block_ids() if len(pool.index.content_of(block_id) or b"") == 8]
    node, position = pool.index.position_of(last) or pytest.fail("it is published")
    node.data = bytearray(4 * SIZE)
    node.entries[position] = entries
    with pytest.raises(InvariantViolation, match="M4"):
        check(memory)


def test_a_first_block_that_starts_with_media_shares_no_token() -> None:
    """Nothing can be said of a block that is not full and that media touch: not even where it differs."""
    memory = KVCacheManager([FullAttention(block_size=SIZE)], 4)
    enter(memory, [7, 7])
    hit = ask(memory, [7, 7, 7], MediaSpan(1, 2, b"fox"))
    assert (hit.num_tokens, hit.end, hit.differs_at) == (0, HitEnd.NOT_CACHED, None)
