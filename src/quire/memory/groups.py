"""Cache groups, and the longest published prefix that all of them can serve."""

from __future__ import annotations

from collections.abc import Sequence

from quire.memory.chain import TokenChain
from quire.memory.pool import NULL_BLOCK, BlockPool
from quire.memory.prefix_index import ChainView
from quire.memory.specs import KVCacheSpec
from quire.memory.status import BlockLoad, HitEnd, PrefixHit
from quire.memory.tiered_view import TieredView


class CacheGroup:
    """The layers that share one `KVCacheSpec`, and the pool of their blocks."""

    __slots__ = ("pool", "spec")

    def __init__(self, spec: KVCacheSpec, pool: BlockPool) -> None:
        self.spec = spec
        self.pool = pool

    def num_dead(self, num_tokens: int) -> int:
        """Return the leading blocks of a table that are dead when so many tokens are computed."""
        return self.spec.first_live_token(num_tokens) // self.spec.block_size


def find_prefix(
    groups: Sequence[CacheGroup],
    chain: TokenChain,
    max_tokens: int | None,
    version: int,
    num_left: int = 1,
    host_groups: Sequence[CacheGroup] = (),
) -> PrefixHit:
    """Find the longest prefix whose live blocks are published in every group, on the device or on the host.

    Each group in turn shortens the prefix to the longest that it can serve, until all agree: a shorter prefix may
    need blocks of a window that a longer one does not.

    Args:
        groups: with one block size.
        chain: of the tokens.
        max_tokens: of the hit, None for all.
        version: see `PrefixHit`.
        num_left: tokens at the end that are left to compute.
        host_groups: the same groups with their blocks on the host; none to look at the device only.
    """
    size = groups[0].spec.block_size
    most = max(0, len(chain.tokens) - num_left) // size
    limit = most if max_tokens is None else min(most, max_tokens // size)
    tiered = [
        TieredView(group.pool.index, host.pool.index, chain, limit)
        for group, host in zip(groups, host_groups, strict=False)
    ]
    views: Sequence[ChainView | TieredView] = tiered or [group.pool.index.view(chain, limit) for group in groups]
    end, ended_by = (HitEnd.LAST_TOKEN if limit == most else HitEnd.LIMIT), None
    length, idx, num_agreed = limit, 0, 0
    while num_agreed < len(groups):
        reach = groups[idx].spec.longest_hit(views[idx], length)
        num_agreed += 1
        if reach < length:
            length, num_agreed = reach, 1
            end, ended_by = HitEnd.NOT_PUBLISHED, idx
        idx = (idx + 1) % len(groups)
    block_ids = []
    for group, view in zip(groups, views, strict=True):
        num_dead = group.num_dead(length * size)
        block_ids.append((NULL_BLOCK,) * num_dead + view.block_ids(num_dead, length))
    loads = tuple(
        BlockLoad(idx, *place)
        for idx, (group, view) in enumerate(zip(groups, tiered, strict=False))
        for place in view.host_blocks(group.num_dead(length * size), length)
    )
    num_host_tokens = len({load.block_idx for load in loads}) * size
    return PrefixHit(length * size, tuple(block_ids), end, ended_by, version, loads, num_host_tokens)
