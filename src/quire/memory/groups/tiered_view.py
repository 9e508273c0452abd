"""The published blocks of a chain on both tiers: the device's, and the host's where the device has none."""

from __future__ import annotations

from quire.memory.pool.pool import NULL_BLOCK
from quire.memory.prefix.published import PublishedBlocks
from quire.memory.prefix.token_chain import TokenChain


class TieredView:
    """One chain's published blocks in the indexes of two tiers; the host serves blocks that the device lacks.

    Args:
        device: index of the device pool.
        host: index of the host pool.
        chain: the chain.
        num_blocks: greatest number of full blocks of the chain that will be queried.
    """

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
            found = self._found(0, self._num_blocks)
            self._leading = found.index(NULL_BLOCK) if NULL_BLOCK in found else len(found)
        return min(self._leading, limit)

    def last_gap(self, start: int, end: int) -> int:
        """Return the last block in `[start, end)` that is not published, or -1."""
        found = self._found(start, end) if start < end else []
        return end - 1 - found[::-1].index(NULL_BLOCK) if NULL_BLOCK in found else -1

    def block_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Return the blocks of `[start, end)`, all known to be published; null for those on the host only."""
        return tuple(self._device.published(self._chain, start, end)) if start < end else ()

    def host_blocks(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return (block index, host block) of the blocks in `[start, end)`, all published, that only the host has."""
        if start >= end:
            return []
        here, there = (index.published(self._chain, start, end) for index in (self._device, self._host))
        pairs = enumerate(zip(here, there, strict=True), start)
        return [(idx, host_id) for idx, (block_id, host_id) in pairs if block_id == NULL_BLOCK]

    def _found(self, start: int, end: int) -> list[int]:
        """Return blocks of either tier that hold the chain's blocks `[start, end)`, the null block where none does."""
        here, there = (index.published(self._chain, start, end) for index in (self._device, self._host))
        return [block_id or host_id for block_id, host_id in zip(here, there, strict=True)]
