"""What a chain finds on both tiers: the device's blocks, and the host's where the device has none."""

from __future__ import annotations

from quire.memory.chain import TokenChain
from quire.memory.pool import NULL_BLOCK
from quire.memory.prefix_index import PrefixIndex


class TieredView:
    """One chain's published blocks in the indexes of two tiers; the host is asked for what the device has not.

    Args:
        device: the index of the device.
        host: the index of the host.
        chain: whose blocks.
        num_blocks: full blocks of the chain that may be asked about.
    """

    __slots__ = ("_chain", "_device", "_host", "_leading", "_num_blocks")

    def __init__(self, device: PrefixIndex, host: PrefixIndex, chain: TokenChain, num_blocks: int) -> None:
        self._device = device
        self._host = host
        self._chain = chain
        self._num_blocks = num_blocks
        self._leading: int | None = None

    def leading(self, limit: int) -> int:
        """Return how many of the first `limit` blocks are published without a gap."""
        if self._leading is None:
            count = len(self._device.leading(self._chain, self._num_blocks))
            while count < self._num_blocks and self._holds(count):
                count += 1
            self._leading = count
        return min(self._leading, limit)

    def last_gap(self, start: int, end: int) -> int:
        """Return the last block in `[start, end)` that is not published, or -1."""
        return next((idx for idx in range(end - 1, start - 1, -1) if not self._holds(idx)), -1)

    def block_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Return the blocks of `[start, end)`, all known to be published; null for those on the host only."""
        return tuple(
            NULL_BLOCK if entry is None else entry[0]
            for entry in map(self._device.get, self._chain.digests(end)[start:end])
        )

    def host_blocks(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the places in `[start, end)`, all known to be published, that are on the host only; and the blocks."""
        digests = self._chain.digests(end)
        places = [idx for idx in range(start, end) if self._device.get(digests[idx]) is None]
        return [(idx, self._host.block_ids(self._chain, idx, idx + 1)[0]) for idx in places]

    def _holds(self, block_idx: int) -> bool:
        digest = self._chain.digests(block_idx + 1)[block_idx]
        # A digest that collides on the device could not be published there: the host is not asked for it.
        entry = self._device.get(digest) or self._host.get(digest)
        return entry is not None and self._chain.recognises(block_idx, entry[1])
