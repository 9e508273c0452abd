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

from quire.memory.chain import TOKEN_BYTES, TokenChain, num_common
from quire.memory.groups import CacheGroup
from quire.memory.pool import NULL_BLOCK
from quire.memory.sequence_memory import SequenceMemory
from quire.memory.stem import Place

# Blocks behind the same one that are looked at, the youngest: the first block of all prompts may have thousands.
MAX_CANDIDATES = 32


class Continuation(NamedTuple):
    """A block that comes next after a chain's whole blocks, in every group.

    Args:
        num_tokens: leading tokens of it that are those wanted.
        content: of the block.
        block_ids: of each group.
        place: where it is published; None where it is not yet.
    """

    num_tokens: int
    content: bytes
    block_ids: tuple[int, ...]
    place: Place | None


def longest_continuation(
    groups: Sequence[CacheGroup], chain: TokenChain, num_blocks: int, content: bytes
) -> Continuation | None:
    """Return the published block behind a chain's first ones that has most leading tokens in common with a content.

    The youngest of several; behind at least one block also one that has nothing in common. Tokens are compared, and the
    place proves what comes before (M4).
    """
    index = groups[0].pool.index
    trail = index.tree.walk(chain, num_blocks)
    if not trail.stems or trail.num_known < num_blocks:
        return None
    stem, position = trail.place_after(num_blocks)
    # The entries of media make a content longer than a block's tokens.
    most = TOKEN_BYTES * groups[0].spec.block_size
    if len(content) > most:
        places = stem.children_at(position, MAX_CANDIDATES)
        alike = [place for place in places if place[0].content(place[1]) == content]
    else:
        # Most of many begin otherwise. Where nothing can be said of the tokens wanted, nothing is like them.
        alike = stem.children_at(position, MAX_CANDIDATES, content[:TOKEN_BYTES]) if content else []
    best: Continuation | None = None
    for place in alike:
        theirs = place[0].content(place[1])
        count = num_common(theirs, content[:most])
        if best is None or count > best.num_tokens:
            block_ids = _in_every_group(groups, place)
            if block_ids:
                best = Continuation(count, theirs, block_ids, place)
    if best is not None or not num_blocks:
        # All prompts that have nothing in common follow the same root: that says nothing.
        return best
    places = stem.children_at(position, MAX_CANDIDATES)
    others = ((place, _in_every_group(groups, place)) for place in places)
    return next((Continuation(0, place[0].content(place[1]), ids, place) for place, ids in others if ids), None)


def publish_tail(groups: Sequence[CacheGroup], state: SequenceMemory) -> Place | None:
    """Publish the partly filled last block of a sequence that ends, if it is new; see `tail_of`.

    Returns:
        Where its tokens are published now; None where they are not.
    """
    tail = tail_of(groups, state)
    if tail is None or tail.place is not None:
        return tail and tail.place
    stem = groups[0].pool.index.tree.grow_tail(state.chain, state.num_published, tail.content)
    if stem is None:
        return None
    for group, block_id in zip(groups, tail.block_ids, strict=True):
        group.pool.index.put((stem, 0), block_id)
    return stem, 0


def tail_of(groups: Sequence[CacheGroup], state: SequenceMemory) -> Continuation | None:
    """Return where the tokens of a sequence's partly filled last block are found once it ends.

    That is a published block that has them all already; or its own, to be published. None where they cannot be: no such
    tokens; some that stand for media; or a block that others hold, and so may go on to write, or that is published.
    """
    size = groups[0].spec.block_size
    block_idx, num_tokens = divmod(state.num_computed, size)
    if not (num_tokens and state.is_publishing and state.num_published == block_idx):
        return None
    block_ids = tuple(table[block_idx] for table in state.tables)
    for group, block_id in zip(groups, block_ids, strict=True):
        if group.spec.carries or group.pool.ref_counts[block_id] > 1 or block_id in group.pool.index:
            return None
    start, chain = block_idx * size, state.chain
    if chain.has_media(start, state.num_computed):
        return None
    content = chain.part(start, state.num_computed)
    known = longest_continuation(groups, chain, block_idx, content)
    return known if known is not None and known.num_tokens == num_tokens else Continuation(0, content, block_ids, None)


def _in_every_group(groups: Sequence[CacheGroup], place: Place) -> tuple[int, ...]:
    """Return the blocks published at a place; none where a group has none."""
    block_ids = tuple(group.pool.index.at(place) for group in groups)
    return () if NULL_BLOCK in block_ids else block_ids
