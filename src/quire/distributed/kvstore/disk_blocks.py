"""Blocks outside memory: copies between memory and the stores below it, which are the disk, a remote store and others.

Reads try the records that have arrived from slow sources, then the disk; blocks are saved to disk and remote store.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch
from torch import Tensor

from quire.distributed.kvstore.counters import SourceCounters
from quire.distributed.kvstore.exports import ExportTable
from quire.distributed.kvstore.prefix_store import PrefixStore
from quire.distributed.kvstore.record import ArrivingBytes, bytes_of, record_key, unpack
from quire.distributed.kvstore.remote_store import RemoteStore
from quire.distributed.kvstore.sources import Record
from quire.memory.results import StoredBlock

logger = logging.getLogger(__name__)

# Capacity of a store without a byte limit: saving at shutdown then ends by its time limit.
UNLIMITED: Final = 1 << 62
# Limit of the bytes in transit from a device to be saved, which are pinned memory; stores have their own limits for
# blocks that have arrived.
MOST_ARRIVING_BYTES: Final = 256 << 20


class Arrival(NamedTuple):
    """A record that has arrived from a slow source and is not verified yet.

    Args:
        record: the record.
        block: block of the record at the source, whose namespace may be another one.
        counters: counters of the source.
    """

    record: Record
    block: StoredBlock
    counters: SourceCounters


class DiskBlocks:
    """The disk tier: a fetched block waits under a ticket for the `BlockCopy` with that ticket.

    Args:
        key: secret key of the digests, the same after a restart.
        identity: see `PrefixStore`.
        block_bytes: bytes of a block of each cache group.
        disk: prefix cache on disk; None without one. All stores are closed with this.
        remote: remote prefix cache; None without one.
        exports: blocks that other engines may fetch; None if this engine exports no blocks.

    Attributes:
        arrived: records from slow sources by key; `SourceLoads` adds them, and drops records that are not fetched.
    """

    def __init__(
        self,
        key: bytes,
        identity: bytes,
        block_bytes: Sequence[int],
        *,
        disk: PrefixStore | None = None,
        remote: RemoteStore | None = None,
        exports: ExportTable | None = None,
    ) -> None:
        self.key, self.identity = key, identity
        self.disk, self.remote, self.exports = disk, remote, exports
        self.arrived: dict[bytes, Arrival] = {}
        self._stores: list[PrefixStore | RemoteStore] = [store for store in (disk, remote) if store is not None]
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
    def capacity(self) -> int:
        """Limit of the bytes of blocks."""
        return UNLIMITED if self.remote is not None else 0 if self.disk is None else self.disk.capacity

    # ---- reading ----

    def holds(self, block: StoredBlock) -> bool:
        """Return whether a block has arrived, or is on disk; the block itself is not read."""
        return self.has_arrived(block) or (self.disk is not None and self.disk.holds(block))

    def has_arrived(self, block: StoredBlock) -> bool:
        """Return whether a block's record has arrived: it is in memory, so fetching it takes no load time."""
        return record_key(self.identity, block) in self.arrived

    def lacks(self, block: StoredBlock) -> bool:
        """Return whether saving a block would write it."""
        return not all(store.holds(block) for store in self._stores)

    def fetch(self, block: StoredBlock) -> int | None:
        """Read a block; return the ticket of its bytes, or None if it is missing, damaged, or another block."""
        data = torch.empty(self._block_bytes[block.group_idx], dtype=torch.uint8)
        out = bytes_of(data)
        if not self._take_arrived(block, out) and (self.disk is None or not self.disk.fetch(block, out)):
            return None
        self._next_ticket += 1
        self._fetched[self._next_ticket] = data
        return self._next_ticket

    def _take_arrived(self, block: StoredBlock, out: memoryview) -> bool:
        """Copy the bytes of a block that has arrived; its record is forgotten."""
        key = record_key(self.identity, block)
        arrival = self.arrived.pop(key, None)
        if arrival is None:
            return False
        record, stored, counters = arrival
        is_good = unpack(record_key(self.identity, stored), stored, memoryview(record), out)
        counters.num_hits += is_good
        counters.loaded_bytes += is_good * len(out)
        counters.num_damaged += not is_good
        return is_good

    def take(self, ticket: int) -> Tensor:
        """Return the bytes of a ticket, uint8 [bytes of the block], and forget the ticket."""
        return self._fetched.pop(ticket)

    def drop(self, tickets: Iterable[int]) -> None:
        """Forget fetched blocks that are not needed any more."""
        for ticket in tickets:
            self._fetched.pop(ticket, None)

    # ---- saving ----

    def save(self, block: StoredBlock, data: Tensor | Callable[[], ArrivingBytes], *, wait: bool = False) -> None:
        """Queue a block for writing, at once if its bytes are in host memory, else once they have arrived."""
        may_wait = wait and self._may_wait
        if self._exported is not None:
            self._export(block, data)
        elif isinstance(data, Tensor):
            self._put(block, data, wait=may_wait)
        elif may_wait:
            self._put(block, data().wait(), wait=True)
        else:
            self._save_later(block, data)

    def _put(self, block: StoredBlock, data: Tensor, *, wait: bool = False) -> None:
        for store in self._stores:
            store.save(block, bytes_of(data), wait=wait)

    def _export(self, block: StoredBlock, data: Tensor | Callable[[], ArrivingBytes]) -> None:
        """Keep a block for other engines, if its key is to be exported."""
        key = record_key(self.identity, block)
        if self.exports is None or self._exported is None or key not in self._exported:
            return
        exported = bytes_of(data) if isinstance(data, Tensor) else data
        self.exports.put(key, block, exported, self._block_bytes[block.group_idx])

    def _save_later(self, block: StoredBlock, fetch: Callable[[], ArrivingBytes]) -> None:
        """Queue a block for writing once its bytes have arrived; drop it if too many bytes are in transit."""
        num_bytes = self._block_bytes[block.group_idx]
        if self._arriving_bytes + num_bytes > MOST_ARRIVING_BYTES:
            self.save_arrived()
        if self._arriving_bytes + num_bytes > MOST_ARRIVING_BYTES:
            for store in self._stores:
                store.queue.drop()
            return
        self._arriving.append((block, fetch()))
        self._arriving_bytes += num_bytes
        self.save_arrived()

    def save_arrived(self, *, wait: bool = False) -> None:
        """Queue the blocks whose bytes have arrived for writing; with `wait`, wait for the bytes of all blocks."""
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
            self._put(block, arrived)

    def _forget_arriving(self) -> None:
        self._arriving.clear()
        self._arriving_bytes = 0

    @contextmanager
    def copying_out(self, exports: Iterable[bytes] | None) -> Iterator[None]:
        """Within the context, `save` does not wait for stores; given `exports`, it exports these instead of saving."""
        self._may_wait, self._exported = False, None if exports is None else set(exports)
        try:
            yield
        finally:
            self._may_wait, self._exported = True, None

    # ---- all stores ----

    def touch(self, blocks: Iterable[StoredBlock]) -> None:
        """Mark the blocks on disk as used, in this order, once all queued writes are done."""
        self.save_arrived(wait=True)
        if self.disk is not None:
            self.disk.touch(blocks)

    def reset(self) -> None:
        """Hide all blocks that were saved until now, and delete them from all stores."""
        self._forget_arriving()
        self.arrived.clear()
        for store in (*self._stores, self.exports):
            if store is not None:
                store.reset()

    def close(self) -> None:
        """Complete the queued writes, within a time limit, and close all stores."""
        self._fetched.clear()
        self.save_arrived(wait=True)
        for store in (*self._stores, self.exports):
            if store is not None:
                store.close()
