"""Cache groups, and the longest published prefix that all of them can serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.memory.pool.pool import NULL_BLOCK, BlockPool
from quire.memory.prefix.published import ChainView, PublishedBlocks
from quire.memory.prefix.token_chain import TokenChain
from quire.memory.results import BlockLoad
from quire.memory.specs import KVCacheSpec, PublishedRun


class CacheGroup:
    """The layers that share one `KVCacheSpec`, and the pool of their blocks.

    Args:
        spec: kind of the cache.
        pool: pool of the blocks.

    Attributes:
        is_recurrent: `spec.is_recurrent`.
    """

    __slots__ = ("is_recurrent", "pool", "spec")

    def __init__(self, spec: KVCacheSpec, pool: BlockPool) -> None:
        self.spec = spec
        self.pool = pool
        self.is_recurrent = spec.is_recurrent

    def num_skipped(self, num_tokens: int) -> int:
        """Return the number of leading blocks of a table that are not read once `num_tokens` tokens are computed."""
        return self.spec.first_live_token(num_tokens) // self.spec.block_size


class TieredView:
    """One chain's published blocks in the indexes of two tiers; the host serves blocks that the device lacks."""

    __slots__ = ("_chain", "_device", "_host", "_leading", "_num_blocks")

    def __init__(self, device: PublishedBlocks, host: PublishedBlocks, chain: TokenChain, num_blocks: int) -> None:
        self._device = device
        self._host = host
        self._chain = chain
        self._num_blocks = num_blocks
        self._leading: int | None = None

    def leading(self, limit: int) -> int:
        """Return how many of the first `limit` blocks are published without a gap."""
        if self._leading is None:
            block_ids = self._found(0, self._num_blocks)
            self._leading = block_ids.index(NULL_BLOCK) if NULL_BLOCK in block_ids else len(block_ids)
        return min(self._leading, limit)

    def last_gap(self, start: int, end: int) -> int:
        """Return the last block in `[start, end)` that is not published, or -1."""
        block_ids = self._found(start, end) if start < end else []
        return end - 1 - block_ids[::-1].index(NULL_BLOCK) if NULL_BLOCK in block_ids else -1

    def block_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Return the blocks of `[start, end)`, all known to be published; null for blocks on the host only."""
        return tuple(self._device.published(self._chain, start, end)) if start < end else ()

    def host_blocks(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return (block index, host block) of blocks on the host only, among `[start, end)`, all published."""
        if start >= end:
            return []
        device_ids, host_ids = (index.published(self._chain, start, end) for index in (self._device, self._host))
        pairs = enumerate(zip(device_ids, host_ids, strict=True), start)
        return [(idx, host_id) for idx, (block_id, host_id) in pairs if block_id == NULL_BLOCK]

    def _found(self, start: int, end: int) -> list[int]:
        """Return the published block of either tier for each of the chain's blocks `[start, end)`; null for none."""
        device_ids, host_ids = (index.published(self._chain, start, end) for index in (self._device, self._host))
        return [block_id or host_id for block_id, host_id in zip(device_ids, host_ids, strict=True)]


class PrefixRun(NamedTuple):
    """A prefix of whole blocks whose live blocks are all published.

    Args:
        num_blocks: number of blocks of the prefix.
        block_ids: blocks of each cache group; null for blocks that the group does not read, or that are on the host.
        group_idx: cache group that limits the length of the prefix; None if only the caller's limit does.
        loads: blocks that are only on the host.
    """

    num_blocks: int
    block_ids: tuple[tuple[int, ...], ...]
    group_idx: int | None
    loads: tuple[BlockLoad, ...] = ()


def find_prefix(
    groups: Sequence[CacheGroup], chain: TokenChain, limit: int, host_groups: Sequence[CacheGroup] = ()
) -> PrefixRun:
    """Find the longest prefix of whole blocks whose live blocks are published in every group, on either tier.

    Each group in turn shortens the prefix to the longest that it can serve, until all agree: a shorter prefix may need
    blocks of a window that a longer one does not. Recurrent groups come last, so that the reason of the hit's end can
    name them. If no token group needs any block (at the end of a chunk), the last block must be published.
    """
    size = groups[0].spec.block_size
    tiers = zip(groups, host_groups, strict=True) if host_groups else ()
    tiered = [TieredView(group.pool.index, host.pool.index, chain, limit) for group, host in tiers]
    views: Sequence[ChainView | TieredView] = tiered or [group.pool.index.view(chain, limit) for group in groups]
    token_groups = [idx for idx, group in enumerate(groups) if not group.spec.is_recurrent]
    length, ended_by = longest_agreed(groups, views, token_groups, limit)
    while length and token_groups and _needs_nothing_published(groups, views, token_groups, length):
        length, lacking = longest_agreed(groups, views, token_groups, length - 1)
        ended_by = ended_by if lacking is None else lacking
    if len(token_groups) < len(groups):
        length, lacking = longest_agreed(groups, views, range(len(groups)), length)
        ended_by = ended_by if lacking is None else lacking
    block_ids = []
    loads: list[BlockLoad] = []
    for idx, (group, view) in enumerate(zip(groups, views, strict=True)):
        num_skipped = group.num_skipped(length * size)
        live = view.block_ids(num_skipped, length)
        block_ids.append((NULL_BLOCK,) * num_skipped + live if num_skipped else live)
        if tiered:
            loads += [BlockLoad(idx, *block) for block in tiered[idx].host_blocks(num_skipped, length)]
    return PrefixRun(length, tuple(block_ids), ended_by, tuple(loads))


def _needs_nothing_published(
    groups: Sequence[CacheGroup], views: Sequence[PublishedRun], token_groups: Sequence[int], length: int
) -> bool:
    """Return whether a prefix is an empty hit: no token group reads its blocks, and its last block is not published."""
    num_tokens = length * groups[0].spec.block_size
    is_needed = any(groups[idx].num_skipped(num_tokens) < length for idx in token_groups)
    return not is_needed and all(view.last_gap(length - 1, length) >= 0 for view in views)


def longest_agreed(
    groups: Sequence[CacheGroup], views: Sequence[PublishedRun], members: Sequence[int], length: int
) -> tuple[int, int | None]:
    """Return the longest prefix, in blocks, that some groups can serve, and the group that shortened it last."""
    turn, num_agreed, lacking = 0, 0, None
    while num_agreed < len(members):
        idx = members[turn]
        reach = groups[idx].spec.longest_hit(views[idx], length)
        num_agreed += 1
        if reach < length:
            length, num_agreed, lacking = reach, 1, idx
        turn = (turn + 1) % len(members)
    return length, lacking
