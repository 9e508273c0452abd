"""Hits that end inside a block: a part of a published block, and tails, which are published before they are full.

```
 wanted     |<------ whole blocks ------>| a b c d
 published  [ shared ][ shared ][ shared ]
                                         [ a b x y ]   a block: its first 2 tokens can be used
                                         [ a b c ]     a tail, whose sequence ended there: all 3 can
```

Nothing is copied when a sequence opens on such a block: the sequence holds it like any shared block, and copies it on
write, before the first token after the used ones. Only a tail that is used whole and has no other holder is continued
in place.

Placeholder tokens do not identify their media. So a block with media is used, even in part, only if the prompt's block
has the same content, media included; and placeholder tokens are never published as a tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.memory.groups.cache_group import CacheGroup
from quire.memory.pool.pool import NULL_BLOCK
from quire.memory.prefix.radix_node import NodePosition
from quire.memory.prefix.token_chain import TOKEN_BYTES, TokenChain, num_common
from quire.memory.sequence_blocks import SequenceBlocks

# Maximum number of candidates compared, the most recent ones: after a common first block there may be thousands.
MAX_CANDIDATES = 32


class PartialMatch(NamedTuple):
    """A block that continues a chain's whole blocks, in every group.

    Args:
        num_tokens: number of its leading tokens that equal the chain's next tokens.
        content: content of the block.
        block_ids: block of each group.
        position: position where the blocks are published; None if they are not published yet.
    """

    num_tokens: int
    content: bytes
    block_ids: tuple[int, ...]
    position: NodePosition | None


def longest_partial_match(
    groups: Sequence[CacheGroup], chain: TokenChain, num_blocks: int, content: bytes
) -> PartialMatch | None:
    """Return the published block after a chain's leading blocks with the longest common prefix with a content.

    Of several such blocks it is the most recent one. After at least one block, it may have no token in common. Tokens
    are compared; the tree position guarantees that the earlier blocks are equal (M4).
    """
    cursor = groups[0].pool.index.tree.match(chain, num_blocks)
    if not cursor.nodes or cursor.num_known < num_blocks:
        return None
    node, position = cursor.position_after(num_blocks)
    # A content with media entries is longer than a block's tokens.
    size = TOKEN_BYTES * groups[0].spec.block_size
    if len(content) > size:
        children = node.children_at(position, MAX_CANDIDATES)
        alike = [child for child in children if child[0].content(child[1]) == content]
    else:
        # Most of many candidates begin with another token. An empty content (media, and no full block) matches none.
        alike = node.children_at(position, MAX_CANDIDATES, content[:TOKEN_BYTES]) if content else []
    best: PartialMatch | None = None
    for child in alike:
        theirs = child[0].content(child[1])
        count = num_common(theirs, content[:size])
        if best is None or count > best.num_tokens:
            block_ids = _in_every_group(groups, child)
            if block_ids:
                best = PartialMatch(count, theirs, block_ids, child)
    if best is not None or not num_blocks:
        # Every prompt of the namespace follows the root: a first block without a common token is no continuation.
        return best
    for child in node.children_at(position, MAX_CANDIDATES):
        block_ids = _in_every_group(groups, child)
        if block_ids:
            return PartialMatch(0, child[0].content(child[1]), block_ids, child)
    return None


def publish_tail(groups: Sequence[CacheGroup], state: SequenceBlocks) -> NodePosition | None:
    """Publish the partly filled last block of a sequence that ends, if it is new; see `tail_of`."""
    tail = tail_of(groups, state)
    if tail is None or tail.position is not None:
        return tail and tail.position
    node = groups[0].pool.index.tree.insert_partial(state.chain, state.num_published, tail.content)
    if node is None:
        return None
    for group, block_id in zip(groups, tail.block_ids, strict=True):
        group.pool.index.put((node, 0), block_id)
    return node, 0


def tail_of(groups: Sequence[CacheGroup], state: SequenceBlocks) -> PartialMatch | None:
    """Return the block that will have the tokens of a sequence's partly filled last block once the sequence ends.

    It is a published block with all of these tokens, or else the sequence's own block, to be published. None if the
    last block is full, has media, has other holders (which may write to it), or is already published.
    """
    size = groups[0].spec.block_size
    block_idx, num_tokens = divmod(state.num_computed, size)
    if not (num_tokens and state.is_publishing and state.num_published == block_idx):
        return None
    block_ids = tuple(table[block_idx] for table in state.tables)
    for group, block_id in zip(groups, block_ids, strict=True):
        if group.spec.is_recurrent or group.pool.ref_counts[block_id] > 1 or block_id in group.pool.index:
            return None
    start, chain = block_idx * size, state.chain
    if chain.has_media(start, state.num_computed):
        return None
    content = chain.part(start, state.num_computed)
    match = longest_partial_match(groups, chain, block_idx, content)
    return match if match is not None and match.num_tokens == num_tokens else PartialMatch(0, content, block_ids, None)


def _in_every_group(groups: Sequence[CacheGroup], position: NodePosition) -> tuple[int, ...]:
    """Return the block of each group that is published at a position; empty if a group has none."""
    block_ids = tuple(group.pool.index.at(position) for group in groups)
    return () if NULL_BLOCK in block_ids else block_ids
