"""Mutants of the prefix cache: the tree, hits, partial blocks, tails and media."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from quire.memory import KVCacheManager, MediaSpan, Namespace, TokenChain
from quire.memory.capacity_queries import CapacityQueries
from quire.memory.groups import partial_block
from quire.memory.groups.partial_block import PartialMatch
from quire.memory.prefix import token_chain
from quire.memory.prefix.published import ChainView
from quire.memory.prefix.radix_node import RadixNode
from quire.memory.prefix.token_chain import TOKEN_BYTES
from quire.memory.tables.tables import BlockTables
from tests.memory.checkers import (
    audited_run,
    media_read_back,
    media_reference,
    media_run,
    media_world,
    scheduler_run,
    small_world,
    walk_read_back,
    walk_reference,
    window_world,
)
from tests.mutants.table import Bug, Mutant, Seam, ignored, replaced, returning


def shorten_digests(honest: Any, parent: bytes, contents: Iterable[bytes]) -> list[bytes]:
    """Return digests of one byte, which collide now and then."""
    digests = []
    for content in contents:
        parent = honest(parent, (content,))[0][:1] + b"?"
        digests.append(parent)
    return digests


SHORT_DIGESTS = Seam(token_chain, "block_digests", shorten_digests)


def branch_by_digest(_: Any, node: RadixNode, position: int, content: bytes) -> RadixNode | None:
    return node.branches.get(position, {}).get(node.name_of_branch(content))


def count_all_equal(_: Any, node: RadixNode, __: TokenChain, start: int, end: int) -> int:
    return min(end - start, node.first + node.length - start)


def own_tail(honest: Any, memory: KVCacheManager, seq_id: int, *args: Any) -> None:
    honest(memory, seq_id, *args)
    memory.sequences[seq_id].tail_is_private = True


def match_counting(count: Callable[[int, int, int], int]) -> Bug:
    """Return the bug that a partial match counts other common tokens, given the right count and both lengths."""

    def num_common(honest: Any, one: bytes, other: bytes) -> int:
        return count(honest(one, other), len(one) // TOKEN_BYTES, len(other) // TOKEN_BYTES)

    def longest_partial_match(honest: Any, *args: Any) -> Any:
        with replaced(token_chain, "num_common", num_common):
            return honest(*args)

    return longest_partial_match


def match_in_first_group(honest: Any, groups: Any, *args: Any) -> Any:
    match = honest(groups[:1], *args)
    return match and match._replace(block_ids=match.block_ids * len(groups))


def pad_tail(honest: Any, groups: Any, state: Any) -> Any:
    tail = honest(groups, state)
    return tail and tail._replace(content=tail.content.ljust(TOKEN_BYTES * groups[0].spec.block_size, b"\0"))


def own_known_tail(honest: Any, groups: Any, state: Any) -> Any:
    tail = honest(groups, state)
    if tail is None or tail.position is None:
        return tail
    start = state.num_published * groups[0].spec.block_size
    block_ids = tuple(table[state.num_published] for table in state.tables)
    return PartialMatch(0, state.chain.part(start, state.num_computed), block_ids, None)


def tail_with_media(honest: Any, *args: Any) -> Any:
    with replaced(TokenChain, "has_media", returning(False)):
        return honest(*args)


def allow_without_copy(honest: Any, queries: CapacityQueries, num_tokens: int, hit: Any, *args: Any) -> Any:
    return honest(queries, num_tokens, hit._replace(num_copied=0), *args)


def forget_digest(honest: Any, span: MediaSpan, *args: int) -> Any:
    return honest(span._replace(digest=b""), *args)


def forget_place(honest: Any, span: MediaSpan, *args: int) -> Any:
    return honest(span, *args)[:-16] + bytes(8) + b"\1" * 8


def count_from_block(honest: Any, span: MediaSpan, start: int, end: int) -> Any:
    first = max(span.start, start)
    return honest(MediaSpan(first, span.end - first, span.digest), start, end)


def note_first_block(honest: Any, span: MediaSpan, start: int, end: int) -> Any:
    return b"" if start else honest(span, start, end)


def children_by_token(honest: Any, node: RadixNode, position: int, limit: int, first: bytes | None = None) -> Any:
    children = honest(node, position, limit)
    return [child for child in children if first in (None, child[0].content(child[1])[:TOKEN_BYTES])]


def fork_without_media(honest: Any, chain: TokenChain, tokens: list[int]) -> TokenChain:
    child: TokenChain = honest(chain, tokens)
    child.media = ()
    return child


def truncate_media(honest: Any, chain: TokenChain, num_tokens: int) -> None:
    honest(chain, num_tokens)
    chain.media = tuple(span for span in chain.media if span.end <= num_tokens)


def pin_without_media(honest: Any, memory: KVCacheManager, name: str, chain: TokenChain) -> Any:
    return honest(memory, name, memory.chain(chain.tokens, Namespace()) if chain.media else chain)


BOTH = (walk_read_back, walk_reference)
ALL = (*BOTH, small_world, scheduler_run, audited_run)
PARTIAL = (scheduler_run, *BOTH, small_world, audited_run)
MEDIA_BOTH = (media_read_back, media_reference)
MEDIA = (*MEDIA_BOTH, media_world)
PREFIX = (
    Mutant("evicted_position_kept", RadixNode, "unpublish", ignored, ALL),
    Mutant("child_of_evicted_block_kept", RadixNode, "drop_child", ignored, (*BOTH, small_world, window_world)),
    Mutant(
        "namespace_ignored",
        token_chain,
        "root_of",
        lambda honest, _, key: honest(Namespace(), key),
        BOTH,
    ),
    Mutant("chain_not_truncated", TokenChain, "truncate", ignored, (*BOTH, small_world)),
    Mutant(
        "digest_trusted",
        RadixNode,
        "branch",
        branch_by_digest,
        (walk_read_back,),
        more=(SHORT_DIGESTS, Seam(RadixNode, "num_equal", count_all_equal)),
    ),
    Mutant("gap_in_window_hit", ChainView, "last_gap", returning(-1), BOTH),
    Mutant(
        "divergence_ignored",
        KVCacheManager,
        "match_prefix",
        lambda honest, *args: honest(*args)._replace(diverged_at=0),
        (walk_reference,),
    ),
    # ---- partial blocks and tails ----
    Mutant(
        "partial_block_written_in_place",
        KVCacheManager,
        "allocate",
        own_tail,
        PARTIAL,
    ),
    Mutant(
        "partial_match_one_too_long",
        partial_block,
        "longest_partial_match",
        match_counting(lambda right, *lengths: min(right + 1, *lengths)),
        PARTIAL,
    ),
    Mutant(
        "partial_match_not_compared",
        partial_block,
        "longest_partial_match",
        match_counting(lambda _, *lengths: min(lengths)),
        PARTIAL,
    ),
    Mutant(
        "partial_match_in_first_group_only",
        partial_block,
        "longest_partial_match",
        match_in_first_group,
        (*BOTH, scheduler_run, audited_run),
    ),
    Mutant(
        "admission_ignores_partial_copy",
        CapacityQueries,
        "can_allocate",
        allow_without_copy,
        (walk_reference, walk_read_back, small_world),
    ),
    Mutant(
        "partial_block_not_preserved",
        BlockTables,
        "grow",
        lambda honest, *args, **options: honest(*args, **{**options, "may_copy_published": False}),
        (walk_reference, small_world),
    ),
    Mutant("tail_not_published", partial_block, "publish_tail", ignored, (walk_reference, small_world)),
    Mutant("tail_published_as_whole_block", partial_block, "tail_of", pad_tail, (walk_reference, small_world)),
    Mutant("tail_published_twice", partial_block, "tail_of", own_known_tail, (walk_reference, small_world)),
    # ---- media ----
    Mutant(
        "media_ignored",
        KVCacheManager,
        "chain",
        lambda honest, memory, tokens, namespace, *_: honest(memory, tokens, namespace),
        (*MEDIA, media_run),
    ),
    Mutant("media_digest_ignored", MediaSpan, "entry", forget_digest, MEDIA),
    Mutant("media_position_ignored", MediaSpan, "entry", forget_place, MEDIA),
    Mutant("media_position_relative_to_block", MediaSpan, "entry", count_from_block, MEDIA_BOTH),
    Mutant("media_in_first_block_only", MediaSpan, "entry", note_first_block, MEDIA_BOTH),
    Mutant("media_in_partial_block_ignored", TokenChain, "has_media", returning(False), MEDIA),
    Mutant("media_block_matched_in_part", RadixNode, "children_at", children_by_token, (media_world, *MEDIA_BOTH)),
    Mutant("tail_with_media_published", partial_block, "tail_of", tail_with_media, (media_world, media_reference)),
    Mutant("fork_forgets_media", TokenChain, "fork", fork_without_media, MEDIA_BOTH),
    Mutant("truncate_drops_media", TokenChain, "truncate", truncate_media, MEDIA),
    Mutant("pin_ignores_media", KVCacheManager, "pin", pin_without_media, (media_reference,)),
)
