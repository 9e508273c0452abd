"""Blocks on their way between memory and disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import c_ubyte

import torch
from torch import Tensor

from quire.kvstore.prefix_store import PrefixStore, StoreStats
from quire.memory.results import StoredBlock


class DiskBlocks:
    """The disk as a tier: what is fetched waits under a ticket for the movement that names it.

    Args:
        store: of the blocks; closed with this.
        block_bytes: of each cache group.
    """

    def __init__(self, store: PrefixStore, block_bytes: Sequence[int]) -> None:
        self._store = store
        self._block_bytes = tuple(block_bytes)
        self._fetched: dict[int, Tensor] = {}
        self._next_ticket = 0

    @property
    def key(self) -> bytes:
        """The secret of the digests, which is the same after a restart."""
        return self._store.key

    def holds(self, block: StoredBlock) -> bool:
        """Say whether a block is on disk, as far as is known without reading it."""
        return self._store.holds(block)

    def fetch(self, block: StoredBlock) -> int | None:
        """Read a block.

        Returns:
            The ticket under which its bytes wait; None when it is not there, or not whole.
        """
        data = torch.empty(self._block_bytes[block.group_idx], dtype=torch.uint8)
        if not self._store.fetch(block, _bytes_of(data)):
            return None
        self._next_ticket += 1
        self._fetched[self._next_ticket] = data
        return self._next_ticket

    def take(self, ticket: int) -> Tensor:
        """Hand over what was fetched, uint8 [bytes of the block]; once."""
        return self._fetched.pop(ticket)

    def drop(self, tickets: Iterable[int]) -> None:
        """Let go of what was fetched and is not wanted after all."""
        for ticket in tickets:
            self._fetched.pop(ticket, None)

    def save(self, block: StoredBlock, data: Tensor, *, wait: bool = False) -> None:
        """Have a block written; its bytes are copied before this returns.

        Args:
            block: what it is.
            data: uint8 [bytes of the block], in the memory of the host.
            wait: see `PrefixStore.save`.
        """
        self._store.save(block, _bytes_of(data), wait=wait)

    @property
    def capacity(self) -> int:
        """Bytes of blocks that the disk may hold."""
        return self._store.capacity

    def touch(self, blocks: Iterable[StoredBlock]) -> None:
        """Note that blocks were used, in this order, once all that waits is written."""
        self._store.touch(blocks)

    def reset(self) -> None:
        """Make nothing that was saved until now be hit again."""
        self._store.reset()

    def close(self) -> None:
        """Write what waits, and let go of the store."""
        self._fetched.clear()
        self._store.close()

    @property
    def stats(self) -> StoreStats:
        """The store's counters."""
        return self._store.stats


def _bytes_of(data: Tensor) -> memoryview:
    """Return a tensor's own bytes; valid as long as the tensor is."""
    return memoryview((c_ubyte * data.numel()).from_address(data.data_ptr())).cast("B")
