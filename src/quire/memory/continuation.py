"""What goes on inside a block: part of a published block, and tails that are published before their block is full.

```
 wanted     |<------ whole blocks ------>| a b c d
 published  [ shared ][ shared ][ shared ]
                                         [ a b x y ]   a block: its first 2 tokens can be used
                                         [ a b c ]     a tail, whose sequence ended there: all 3 can
```

Nothing is copied when a sequence opens on such a block: it holds the block like any shared one, and the one rule does
the rest. Who writes behind the tokens that are used gets a copy first. Only a tail of which all is used and that nobody
else holds is continued in place.

Tokens do not say which media they stand for. So a block that media touch is used, in part too, only where exactly that
block is wanted; and tokens that stand for media are never a tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.memory.chain import TOKEN_BYTES, Link, TokenChain, num_common
from quire.memory.groups import CacheGroup
from quire.memory.sequence_memory import SequenceMemory

# Children of one block that are looked at, the youngest: the first block of all prompts may have thousands.
MAX_CANDIDATES = 32


class Continuation(NamedTuple):
    """A published block that comes next after a chain's whole blocks, in every group.

    Args:
        num_tokens: leading tokens of it that are those wanted.
        link: of the block.
        block_ids: of each group.
    """

    num_tokens: int
    link: Link
    block_ids: tuple[int, ...]


def longest_continuation(
    groups: Sequence[CacheGroup], chain: TokenChain, num_blocks: int, content: bytes
) -> Continuation | None:
    """Return the child of a chain's first blocks that has most leading tokens in common with a content.

    The youngest of several; behind at least one block also one that has nothing in common. Tokens are compared, and so
    are parents: a collision is never a hit (M4).
    """
    best: Continuation | None = None
    children = groups[0].pool.index.children(chain.digest_before(num_blocks), MAX_CANDIDATES)
    first = content[:TOKEN_BYTES]
    # The entries of media make a content longer than a block's tokens.
    most = TOKEN_BYTES * groups[0].spec.block_size
    if len(content) > most:
        alike = [link for link in children if link[1] == content]
    else:
        # Most of many begin otherwise. Where nothing can be said of the tokens wanted, nothing is like them.
        alike = [link for link in children if first and link[1].startswith(first) and len(link[1]) <= most]
    for link in alike:
        count = num_common(link[1], content[:most])
        if best is None or count > best.num_tokens:
            block_ids = _in_every_group(groups, chain, num_blocks, link)
            if block_ids:
                best = Continuation(count, link, block_ids)
    if best is not None or not num_blocks:
        # All prompts that have nothing in common follow the same root: that says nothing.
        return best
    others = ((link, _in_every_group(groups, chain, num_blocks, link)) for link in children)
    return next((Continuation(0, link, block_ids) for link, block_ids in others if block_ids), None)


def publish_tail(groups: Sequence[CacheGroup], state: SequenceMemory) -> None:
    """Publish the partly filled last block of a sequence that ends, if it is new; see `tail_of`."""
    tail = tail_of(groups, state)
    if tail is not None and tail.num_tokens == 0:
        for group, block_id in zip(groups, tail.block_ids, strict=True):
            group.pool.index.add(tail.link, block_id)


def tail_of(groups: Sequence[CacheGroup], state: SequenceMemory) -> Continuation | None:
    """Return where the tokens of a sequence's partly filled last block are found once it ends.

    That is a published block that has them all already, as many as it says; or its own, to be published, and then 0
    of them are found yet. None where they cannot be: no such tokens; some that stand for media; a block that others
    hold, and so may go on to write, or that is published; or a digest that collides.
    """
    block_idx, num_tokens = divmod(state.num_computed, groups[0].spec.block_size)
    if not (num_tokens and state.is_publishing and state.num_published == block_idx):
        return None
    block_ids = tuple(table[block_idx] for table in state.tables)
    for group, block_id in zip(groups, block_ids, strict=True):
        if group.spec.carries or group.pool.ref_counts[block_id] > 1 or block_id in group.pool.index:
            return None
    if state.chain.has_media(state.num_computed - num_tokens, state.num_computed):
        return None
    link = state.chain.tail_link(state.num_computed)
    known = longest_continuation(groups, state.chain, block_idx, link[1])
    if known is not None and known.num_tokens == num_tokens:
        return known
    if any(group.pool.index.get(link[0]) for group in groups):
        return None
    return Continuation(0, link, block_ids)


def _in_every_group(groups: Sequence[CacheGroup], chain: TokenChain, num_blocks: int, link: Link) -> tuple[int, ...]:
    """Return the blocks published under a link that follows a chain's first blocks; none where a group has none."""
    block_ids = []
    for group in groups:
        entry = group.pool.index.get(link[0])
        if entry is None or entry[1][1] != link[1] or not chain.recognises_parent(num_blocks, entry[1]):
            return ()
        block_ids.append(entry[0])
    return tuple(block_ids)
