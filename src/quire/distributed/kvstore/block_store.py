"""The stores of published blocks outside memory, combined into one: remote records that have arrived, then the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from torch import Tensor

from quire.distributed.kvstore.arriving import ArrivingBytes, bytes_of
from quire.distributed.kvstore.exports import ExportTable
from quire.distributed.kvstore.prefix_store import PrefixStore
from quire.distributed.kvstore.record import record_key, unpack
from quire.distributed.kvstore.remote.remote_store import RemoteStore
from quire.memory.results import StoredBlock

# Capacity of a store without a byte limit: saving at shutdown then ends by its time limit.
UNLIMITED = 1 << 62
# Longest wait for room in the queue of the remote store, at the shutdown.
ROOM_S = 5.0


class BlockStore(Protocol):
    """A store of blocks, for the engine's thread; only `save` with `wait`, `touch` and `close` wait for writes."""

    @property
    def key(self) -> bytes:
        """Key of the digests."""

    @property
    def capacity(self) -> int:
        """Limit of the bytes of blocks."""

    def holds(self, block: StoredBlock) -> bool:
        """Return whether a block can be fetched now."""

    def fetch(self, block: StoredBlock, out: memoryview) -> bool:
        """Read a block's bytes; return False where it is missing, damaged, or another block."""

    def save(self, block: StoredBlock, payload: memoryview, *, wait: bool = False) -> None:
        """Queue a block for writing, unless the store has it; its bytes are copied before this returns."""

    def touch(self, blocks: Iterable[StoredBlock]) -> None:
        """Mark blocks as used, in this order, once all queued writes are done."""

    def reset(self) -> None:
        """Hide all blocks that were saved until now, and delete them."""

    def close(self) -> None:
        """Complete the queued writes, within a time limit."""


class ArrivalCounts(Protocol):
    """Counters of the source that a record came from."""

    num_hits: int
    loaded_bytes: int
    num_damaged: int


class Arrival(NamedTuple):
    """A record that has arrived from a remote source and is not verified yet.

    Args:
        record: bytes of the record.
        source: counters of its source.
    """

    record: bytes
    source: ArrivalCounts


class TieredStore:
    """Several stores as one: reads try the arrived records, then the disk; blocks are saved to disk and remote store.

    Args:
        key: key of the digests.
        identity: see `PrefixStore`.
        disk: prefix cache on disk; None without one.
        remote: remote prefix cache; None without one.
        exports: blocks that other engines may fetch; None where this engine exports no blocks.

    Attributes:
        arrived: records from remote sources by key; `SourceLoads`, which adds them, drops those that are not fetched.
    """

    def __init__(
        self,
        key: bytes,
        identity: bytes,
        disk: PrefixStore | None,
        remote: RemoteStore | None,
        exports: ExportTable | None,
    ) -> None:
        self.key = key
        self.identity = identity
        self.disk = disk
        self.remote = remote
        self.exports = exports
        self.arrived: dict[bytes, Arrival] = {}

    @property
    def capacity(self) -> int:
        """Limit of the bytes of blocks."""
        return UNLIMITED if self.remote is not None else 0 if self.disk is None else self.disk.capacity

    def holds(self, block: StoredBlock) -> bool:
        """Return whether a block has arrived, or is on disk."""
        if record_key(self.identity, block) in self.arrived:
            return True
        return self.disk is not None and self.disk.holds(block)

    def lacks(self, block: StoredBlock) -> bool:
        """Return whether saving a block would write it."""
        if self.disk is not None and not self.disk.holds(block):
            return True
        return self.remote is not None and not self.remote.knows(block)

    def has_arrived(self, block: StoredBlock) -> bool:
        """Return whether a block's record has arrived: it is in memory, so fetching it takes no load time."""
        return record_key(self.identity, block) in self.arrived

    def fetch(self, block: StoredBlock, out: memoryview) -> bool:
        """Read a block's bytes; return False where it is missing, damaged, or another block."""
        key = record_key(self.identity, block)
        arrival = self.arrived.pop(key, None)
        if arrival is not None:
            record, source = arrival
            if unpack(key, block, memoryview(record), out):
                source.num_hits += 1
                source.loaded_bytes += len(out)
                return True
            source.num_damaged += 1
        return self.disk is not None and self.disk.fetch(block, out)

    def save(self, block: StoredBlock, payload: memoryview, *, wait: bool = False) -> None:
        """Queue a block for writing to all stores."""
        if self.disk is not None:
            self.disk.save(block, payload, wait=wait)
        if self.remote is not None and (not wait or self.remote.has_room(ROOM_S)):
            self.remote.save(block, payload)

    def export(self, block: StoredBlock, data: Tensor | Callable[[], ArrivingBytes], num_bytes: int) -> None:
        """Keep a block for other engines.

        Args:
            block: identity of the block.
            data: its bytes, which are copied; or a function that begins to fetch them.
            num_bytes: number of its bytes.
        """
        if self.exports is None:
            return
        key = record_key(self.identity, block)
        if isinstance(data, Tensor):
            self.exports.put(key, block, bytes_of(data))
        else:
            self.exports.put_arriving(key, block, num_bytes, data)

    def drop(self) -> None:
        """Count a block that is not saved, since too many bytes are in transit from the device."""
        for store in (self.disk, self.remote):
            if store is not None:
                store.drop()

    def touch(self, blocks: Iterable[StoredBlock]) -> None:
        """Mark the blocks on disk as used."""
        if self.disk is not None:
            self.disk.touch(blocks)

    def reset(self) -> None:
        """Hide all blocks that were saved until now, and delete them from all stores."""
        self.arrived.clear()
        for store in (self.disk, self.remote, self.exports):
            if store is not None:
                store.reset()

    def close(self) -> None:
        """Complete the queued writes, within a time limit, and close all stores."""
        for store in (self.disk, self.remote, self.exports):
            if store is not None:
                store.close()
