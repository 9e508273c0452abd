"""Block transfers between memory and the stores below it: disk, a remote store, other engines."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from quire.distributed.kvstore.arriving import ArrivingBytes, bytes_of
from quire.distributed.kvstore.block_store import TieredStore
from quire.distributed.kvstore.record import record_key
from quire.memory.results import StoredBlock

logger = logging.getLogger(__name__)

# Limit of the bytes in transit from a device to be saved, which are pinned memory; stores have their own limits for
# blocks that have arrived.
MOST_ARRIVING_BYTES: Final = 256 << 20


class DiskBlocks:
    """The disk tier: a fetched block waits under a ticket for the `BlockCopy` with that ticket.

    Args:
        store: stores of the blocks; closed with this.
        block_bytes: bytes of a block of each cache group.

    Attributes:
        store: the stores.
    """

    def __init__(self, store: TieredStore, block_bytes: Sequence[int]) -> None:
        self.store = self._store = store
        self._may_wait = True
        # Keys of the blocks that are exported, while blocks are saved for other engines only.
        self._exported: set[bytes] | None = None
        self._block_bytes = tuple(block_bytes)
        self._fetched: dict[int, Tensor] = {}
        self._next_ticket = 0
        # Blocks to save, in the order in which their bytes arrive.
        self._arriving: deque[tuple[StoredBlock, ArrivingBytes]] = deque()
        self._arriving_bytes = 0

    @property
    def key(self) -> bytes:
        """Secret key of the digests, the same after a restart."""
        return self._store.key

    def holds(self, block: StoredBlock) -> bool:
        """Return True where the index has a block; the block itself is not read."""
        return self._store.holds(block)

    def fetch(self, block: StoredBlock) -> int | None:
        """Read a block.

        Returns:
            The ticket of its bytes; None where the block is missing or damaged.
        """
        data = torch.empty(self._block_bytes[block.group_idx], dtype=torch.uint8)
        if not self._store.fetch(block, bytes_of(data)):
            return None
        self._next_ticket += 1
        self._fetched[self._next_ticket] = data
        return self._next_ticket

    def take(self, ticket: int) -> Tensor:
        """Return the bytes of a ticket, uint8 [bytes of the block], and forget the ticket."""
        return self._fetched.pop(ticket)

    def drop(self, tickets: Iterable[int]) -> None:
        """Forget fetched blocks that are not needed any more."""
        for ticket in tickets:
            self._fetched.pop(ticket, None)

    def save(self, block: StoredBlock, data: Tensor | Callable[[], ArrivingBytes], *, wait: bool = False) -> None:
        """Queue a block for writing, at once where its bytes are in host memory, else once they have arrived.

        Args:
            block: identity of the block.
            data: its bytes, which may be overwritten afterwards; or a function that begins to fetch them.
            wait: see `PrefixStore.save`; True waits for the bytes too.
        """
        if self._exported is not None:
            if record_key(self._store.identity, block) in self._exported:
                self._store.export(block, data, self._block_bytes[block.group_idx])
            return
        may_wait = wait and self._may_wait
        if isinstance(data, Tensor):
            self._store.save(block, bytes_of(data), wait=may_wait)
        elif may_wait:
            arrived = data().wait()
            self._store.save(block, bytes_of(arrived), wait=True)
        else:
            self._save_later(block, data)

    def _save_later(self, block: StoredBlock, fetch: Callable[[], ArrivingBytes]) -> None:
        """Queue a block for writing once its bytes have arrived; drop it where too many bytes are in transit."""
        num_bytes = self._block_bytes[block.group_idx]
        if self._arriving_bytes + num_bytes > MOST_ARRIVING_BYTES:
            self.save_arrived()
        if self._arriving_bytes + num_bytes > MOST_ARRIVING_BYTES:
            self._store.drop()
            return
        self._arriving.append((block, fetch()))
        self._arriving_bytes += num_bytes
        self.save_arrived()

    def save_arrived(self, *, wait: bool = False) -> None:
        """Queue the blocks for writing whose bytes have arrived since.

        Args:
            wait: True to wait for the bytes of all blocks.
        """
        arriving = self._arriving
        while arriving:
            block, data = arriving[0]
            try:
                if not (wait or data.is_ready):
                    return
                arrived = data.wait()
            except RuntimeError as error:  # from the device, which copies nothing more
                logger.warning("%d blocks are not saved: %s", len(arriving), error)
                self._forget_arriving()
                return
            arriving.popleft()
            self._arriving_bytes -= self._block_bytes[block.group_idx]
            self._store.save(block, bytes_of(arrived))

    def _forget_arriving(self) -> None:
        self._arriving.clear()
        self._arriving_bytes = 0

    @contextmanager
    def copying_out(self, exports: Iterable[bytes] | None) -> Iterator[None]:
        """Within the context, `save` does not wait for a store, or exports blocks instead of saving them.

        Args:
            exports: keys of the records to export, with no block saved; None to save all blocks.
        """
        self._may_wait, self._exported = False, None if exports is None else set(exports)
        try:
            yield
        finally:
            self._may_wait, self._exported = True, None

    @property
    def capacity(self) -> int:
        """Limit of the bytes of blocks on disk."""
        return self._store.capacity

    def touch(self, blocks: Iterable[StoredBlock]) -> None:
        """Mark blocks as used, in this order, once all queued writes are done."""
        self.save_arrived(wait=True)
        self._store.touch(blocks)

    def reset(self) -> None:
        """Delete all blocks that were saved until now."""
        self._forget_arriving()
        self._store.reset()

    def close(self) -> None:
        """Complete the queued writes, and close the store."""
        self._fetched.clear()
        self.save_arrived(wait=True)
        self._store.close()
