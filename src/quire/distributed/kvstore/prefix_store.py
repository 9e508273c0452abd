"""The durable prefix cache: published blocks on disk, for later runs and for other engines of the host.

```
 engine's thread    holds?  fetch ---------> StoreFile (mapping) <----- other engines
                    save -> WriteQueue --.          ^
 writer's thread                         '-> batch -' one transaction, the oldest records out
```

The engine's thread never waits for writes. An error on disk is a miss and a counter: a record is used only when its
checksum, tokens and parent match.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Protocol

from quire.distributed.kvstore.counters import SourceCounters, StoreStats
from quire.distributed.kvstore.folder import StoreFolder
from quire.distributed.kvstore.lmdb_file import StoreDamaged, StoreFile, StoreFull
from quire.distributed.kvstore.lmdb_tables import StoreSizes, bytes_on_disk
from quire.distributed.kvstore.record import IDENTITY_BYTES, read_key, record_key, unpack
from quire.distributed.kvstore.sources import Record, WriteBatch
from quire.distributed.kvstore.write_queue import StoreState, WriteQueue
from quire.errors import ConfigError
from quire.memory.results import StoredBlock

logger = logging.getLogger(__name__)

# Share of the file's bytes for records. The rest is for pages of older committed states, and for fragmentation.
LIVE_SHARE = 0.75
# A transaction needs free pages for everything that it writes, so it is limited to a small part of the file.
BATCH_SHARE = 1 / 16
MOST_BATCH_BYTES = 16 << 20


class StoreObserver(Protocol):
    """Receives (group, digest) of blocks that this engine writes to, finds on or deletes from disk; in either thread.

    A reset is not reported block by block; changes by other engines of the folder are not reported.
    """

    def on_stored(self, blocks: Sequence[tuple[int, bytes]]) -> None: ...

    def on_deleted(self, blocks: Sequence[tuple[int, bytes]]) -> None: ...


class PrefixStore:
    """Blocks on disk, by their digests.

    Only the engine's thread calls the methods; a writer thread writes. Other processes may use the folder as well.

    Args:
        folder: folder of the cache; closed with the store.
        identity: digest of the model, its weights, and everything else that determines the bytes of a block,
            `IDENTITY_BYTES` bytes.
        max_bytes: largest size of the file; the least recently used records are deleted first.
        block_bytes: bytes of the largest block.
        clock: clock in seconds, to time loads.

    Attributes:
        capacity: limit of the bytes of records.
        queue: changes that are still to be made.

    Raises:
        ConfigError: LMDB is not installed, the file cannot be made, or `max_bytes` is too few or differs from other
            engines that use the folder.
    """

    def __init__(
        self,
        folder: StoreFolder,
        identity: bytes,
        max_bytes: int,
        block_bytes: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        assert len(identity) == IDENTITY_BYTES
        least = int((2 * block_bytes + (64 << 10)) / BATCH_SHARE)
        if max_bytes < least:
            raise ConfigError(
                f"prefix_cache_disk_bytes must be at least {least} for blocks of {block_bytes} bytes, got {max_bytes}",
                field="prefix_cache_disk_bytes",
            )
        self.capacity = int(max_bytes * LIVE_SHARE)
        self._identity, self._clock, self._folder = identity, clock, folder
        self._counters = SourceCounters()
        self._sizes = StoreSizes(0, 0, 0)
        self.observer: StoreObserver | None = None
        # Keys of damaged records, which are not read until they are deleted.
        self._hidden: set[bytes] = set()
        self._file: StoreFile | None = None
        damage: StoreDamaged | None = None
        try:
            self._file = StoreFile(folder, max_bytes)
            self._counters.num_damaged += self._file.was_damaged
        except StoreDamaged as error:
            damage = error
        self.queue = WriteQueue(
            "prefix-store",
            self._write,
            identity,
            self._counters,
            batch_bytes=min(MOST_BATCH_BYTES, int(max_bytes * BATCH_SHARE)),
            size_of=bytes_on_disk,
            limit_bytes=self.capacity,
        )
        if damage is not None:
            self._break(damage)
        folder.opened()

    # ---- the engine's thread ----

    def holds(self, block: StoredBlock) -> bool:
        """Return whether the store has a block; the block itself is not read."""
        return self._has(record_key(self._identity, block))

    def fetch(self, block: StoredBlock, out: memoryview) -> bool:
        """Read a block's bytes; return False if the record is missing, damaged, or of another block."""
        key, started, counters = record_key(self._identity, block), self._clock(), self._counters
        if not self._is_readable(key) or self._file is None:
            counters.num_misses += 1
            return False
        is_good: bool | None = None

        def take(_: bytes, record: Record) -> None:
            nonlocal is_good
            is_good = unpack(key, block, memoryview(record), out)

        try:
            self._file.fetch([key], take)
        except StoreDamaged as error:
            self._break(error)
            return False
        if is_good:
            self.queue.touch([key])
            counters.num_hits += 1
            counters.loaded_bytes += len(out)
            counters.load_s += self._clock() - started
            return True
        counters.num_misses += 1
        if is_good is not None:
            with self.queue.changed:
                counters.num_damaged += 1
                self._hidden.add(key)
                self._report_deleted([key])
                self.queue.remove(key)
        return False

    def save(self, block: StoredBlock, payload: memoryview, *, wait: bool = False) -> None:
        """Queue a block for writing, unless it is on disk; its bytes are copied before this returns."""
        key = record_key(self._identity, block)
        with self.queue.changed:
            if not self.queue.is_open or key in self.queue:
                return
            if self._has(key):
                self._report_stored([key])
                return
            self.queue.put(key, block, payload, None if wait else 0.0)

    def touch(self, blocks: Iterable[StoredBlock]) -> None:
        """Mark the blocks that are on disk as used, in this order, once all queued writes are done."""
        self.flush()
        self.queue.touch(record_key(self._identity, block) for block in blocks)

    def reset(self) -> None:
        """Hide all records of this model; the writer then deletes them, for all engines."""
        self.queue.reset()

    def flush(self) -> None:
        """Wait until all queued writes and deletions are done."""
        self.queue.flush()

    def close(self) -> None:
        """Complete the queued writes, and close the folder; further calls do nothing."""
        if self.queue.close():
            if self._file is not None:
                self._read_sizes()
                self._file.close(is_sound=self.queue.state is not StoreState.BROKEN)
                self._file = None
            self._folder.close()

    @property
    def stats(self) -> StoreStats:
        """Counters since the start, and the present size."""
        self._read_sizes()
        num_own, num_foreign, num_bytes = self._sizes
        return self._counters.shown_as(StoreStats, num_blocks=num_own, num_foreign=num_foreign, num_bytes=num_bytes)

    @property
    def load_rate(self) -> float | None:
        """Bytes loaded per second; None before the first load."""
        num_bytes, seconds = self._counters.loaded_bytes, self._counters.load_s
        return num_bytes / seconds if num_bytes and seconds else None

    # ---- the writer's thread ----

    def _write(self, batch: WriteBatch) -> None:
        """Write one transaction; if there is no room, drop its records and free space."""
        try:
            assert self._file is not None
            written = self._file.put(batch)
        except (StoreFull, TimeoutError) as error:
            self._give_up(batch, error)
            return
        except (StoreDamaged, OSError) as error:
            self._break(error)
            return
        queue, counters = self.queue, self._counters
        with queue.changed:
            counters.num_saved += written.num_added
            counters.num_deleted += len(written.evicted)
            self._report_deleted(written.evicted)
            if queue.is_current(batch):
                self._report_stored(batch.records)
            self._hidden.difference_update(batch.removed)
            queue.state = StoreState.BROKEN if queue.state is StoreState.BROKEN else StoreState.READY
            if batch.forgotten is not None and written.num_forgotten < batch.most_forgotten:
                queue.forgot(batch.num_resets)

    def _give_up(self, batch: WriteBatch, error: Exception) -> None:
        """Drop the records of a failed transaction and free space; if that has failed, drop the queue as well."""
        queue = self.queue
        with queue.changed:
            if not self._counters.num_full:
                logger.warning("the prefix cache on disk cannot be written, the engine goes on without: %s", error)
            self._counters.num_full += 1
            self._counters.num_dropped += len(batch.records)
            if queue.state is StoreState.BROKEN:
                return
            if batch.forgotten is None and queue.state is not StoreState.FULL and not isinstance(error, TimeoutError):
                queue.state = StoreState.FULL
                return
            queue.state = StoreState.READY if batch.forgotten is None else StoreState.KEEPING
            queue.discard()

    # ---- either thread ----

    def _break(self, error: Exception) -> None:
        """Stop using the damaged file; the next engine that opens it alone renames it."""
        with self.queue.changed:
            if self.queue.state is not StoreState.BROKEN:
                logger.warning("the prefix cache on disk is damaged, the engine goes on without: %s", error)
                self._counters.num_damaged += 1
            self.queue.state = StoreState.BROKEN
            self.queue.discard()
            self._folder.abandon()

    def _has(self, key: bytes) -> bool:
        if not self._is_readable(key) or self._file is None:
            return False
        try:
            return bool(self._file.find([key]))
        except StoreDamaged as error:
            self._break(error)
            return False

    def _read_sizes(self) -> None:
        """Read the present size; it keeps its last value once the file cannot be used."""
        if self._file is not None and self.queue.state is not StoreState.BROKEN:
            try:
                self._sizes = self._file.sizes(self._identity)
            except StoreDamaged as error:
                self._break(error)

    def _report_stored(self, keys: Iterable[bytes]) -> None:
        if self.observer is not None:
            self.observer.on_stored([read_key(key) for key in keys])

    def _report_deleted(self, keys: Iterable[bytes]) -> None:
        if self.observer is not None:
            self.observer.on_deleted([read_key(key) for key in keys if key.startswith(self._identity)])

    def _is_readable(self, key: bytes) -> bool:
        return self.queue.is_open and not self.queue.is_hidden and key not in self._hidden
