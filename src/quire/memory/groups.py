"""Cache groups, and the longest published prefix that all of them can serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.memory.chain import TokenChain
from quire.memory.pool import NULL_BLOCK, BlockPool
from quire.memory.specs import KVCacheSpec


class CacheGroup:
    """The layers that share one `KVCacheSpec`, and the pool of their blocks."""

    __slots__ = ("pool", "spec")

    def __init__(self, spec: KVCacheSpec, pool: BlockPool) -> None:
        self.spec = spec
        self.pool = pool

    def num_dead(self, num_tokens: int) -> int:
        """Return the leading blocks of a table that are dead when so many tokens are computed."""
        return self.spec.first_live_token(num_tokens) // self.spec.block_size


class PrefixRun(NamedTuple):
    """Whole blocks from a chain's start whose live ones are published.

    Args:
        num_blocks: of the prefix.
        block_ids: for each cache group; null where the group needs them no more.
        group_idx: the cache group that keeps it from being longer, None when nothing but the limit does.
    """

    num_blocks: int
    block_ids: tuple[tuple[int, ...], ...]
    group_idx: int | None


def find_prefix(groups: Sequence[CacheGroup], chain: TokenChain, limit: int) -> PrefixRun:
    """Find the longest prefix of whole blocks whose live blocks are published in every group.

    Each group in turn shortens the prefix to the longest that it can serve, until all agree: a shorter prefix may
    need blocks of a window that a longer one does not.

    Args:
        groups: with one block size.
        chain: of the tokens.
        limit: the most blocks.
    """
    size = groups[0].spec.block_size
    views = [group.pool.index.view(chain, limit) for group in groups]
    ended_by = None
    length, idx, num_agreed = limit, 0, 0
    while num_agreed < len(groups):
        reach = groups[idx].spec.longest_hit(views[idx], length)
        num_agreed += 1
        if reach < length:
            length, num_agreed = reach, 1
            ended_by = idx
        idx = (idx + 1) % len(groups)
    block_ids = []
    for group, view in zip(groups, views, strict=True):
        num_dead = group.num_dead(length * size)
        block_ids.append((NULL_BLOCK,) * num_dead + view.block_ids(num_dead, length))
    return PrefixRun(length, tuple(block_ids), ended_by)
