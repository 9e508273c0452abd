"""The durable prefix cache: published blocks on disk, for later runs and for other engines of the host.

```
 engine's thread    holds?  fetch ---------> StoreFile (mapping) <----- other engines
                    save -> pending --.          ^
 writer's thread                      '-> batch -' one transaction, the oldest records out
```

The engine's thread never waits for writes. An error on disk is a miss and a counter: a record is used only when its
checksum, tokens and parent match.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

from quire.distributed.kvstore.disk.folder import StoreFolder
from quire.distributed.kvstore.disk.lmdb_file import StoreDamaged, StoreFile, StoreFull
from quire.distributed.kvstore.disk.lmdb_tables import StoreSizes, WriteBatch, Written, bytes_on_disk
from quire.distributed.kvstore.record import IDENTITY_BYTES, pack, read_key, record_key, seal, unpack
from quire.distributed.kvstore.store_stats import StoreStats
from quire.errors import ConfigError
from quire.memory.results import StoredBlock

logger = logging.getLogger(__name__)

# Share of the file's bytes for records. The rest is for pages of older committed states, and for fragmentation.
LIVE_SHARE = 0.75
# A transaction needs free pages for everything that it writes, so it is limited to a small part of the file.
BATCH_SHARE = 1 / 16
MOST_BATCH_BYTES = 16 << 20
MOST_PENDING_BYTES = 64 << 20


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

    Raises:
        ConfigError: LMDB is not installed, the file cannot be made, `max_bytes` is too few, or is not that of the
            other engines that use the folder.
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
        self._identity = identity
        self._live_bytes = int(max_bytes * LIVE_SHARE)
        self._batch_bytes = min(MOST_BATCH_BYTES, int(max_bytes * BATCH_SHARE))
        self._clock = clock
        self._folder = folder
        self._counts = dict.fromkeys(("hits", "misses", "saved", "deleted", "dropped", "damaged", "full", "bytes"), 0)
        self._load_s = 0.0
        self._sizes = StoreSizes(0, 0, 0)
        self.observer: StoreObserver | None = None
        # The writer's work; one lock guards it.
        self._pending: dict[bytes, bytearray] = {}
        self._pending_bytes = 0
        self._touched: dict[bytes, None] = {}
        # Keys of damaged records: those to delete, and those that are not read until they are deleted.
        self._damaged: list[bytes] = []
        self._hidden: set[bytes] = set()
        self._being_written: dict[bytes, bytearray] = {}
        # Counters of resets and of completed ones; records are hidden until all older ones have been deleted.
        self._num_resets = self._num_forgotten = 0
        # True where the deletion of a reset failed: it is retried with the next record to write.
        self._has_kept = False
        self._is_broken = self._is_stuck = self._is_closing = self._is_writing = False
        self._changed = threading.Condition()
        self._file: StoreFile | None = None
        try:
            self._file = StoreFile(folder, max_bytes)
            self._counts["damaged"] += self._file.was_damaged
        except StoreDamaged as error:
            self._break(error)
        folder.opened()
        self._writer = threading.Thread(target=self._write_on, name="prefix-store", daemon=True)
        self._writer.start()

    # ---- the engine's thread ----

    def holds(self, block: StoredBlock) -> bool:
        """Return True where the store has a block; the block itself is not read."""
        return self._has(record_key(self._identity, block))

    def fetch(self, block: StoredBlock, out: memoryview) -> bool:
        """Read a block's bytes; return False where the record is missing, damaged, or of another block.

        Args:
            block: identity of the block.
            out: destination of the bytes; undefined where the result is False.
        """
        key, started = record_key(self._identity, block), self._clock()
        if not self._is_readable() or self._file is None or key in self._hidden:
            self._counts["misses"] += 1
            return False
        was_there = False

        def take(record: memoryview) -> bool:
            nonlocal was_there
            was_there = True
            return unpack(key, block, record, out)

        try:
            is_good = self._file.read(key, take)
        except StoreDamaged as error:
            self._break(error)
            return False
        with self._changed:
            if is_good:
                self._touched.pop(key, None)
                self._touched[key] = None
                self._counts["bytes"] += len(out)
                self._load_s += self._clock() - started
            elif was_there:
                self._counts["damaged"] += 1
                self._damaged.append(key)
                self._hidden.add(key)
                self._report_deleted([key])
                self._changed.notify_all()
        self._counts["hits" if is_good else "misses"] += 1
        return is_good

    def save(self, block: StoredBlock, payload: memoryview, *, wait: bool = False) -> None:
        """Queue a block for writing, unless it is on disk; its bytes are copied before this returns.

        Args:
            block: identity of the block.
            payload: bytes of the block.
            wait: True to wait while the queue is full; else the block is dropped then.
        """
        key = record_key(self._identity, block)
        with self._changed:
            if not self._is_usable() or key in self._pending or key in self._being_written:
                return
            if self._has(key):
                self._report_stored([key])
                return
            if self._pending_bytes + len(payload) > MOST_PENDING_BYTES and self._pending:
                if not wait:
                    self._counts["dropped"] += 1
                    return
                self._changed.wait_for(lambda: not self._pending)
                if not self._is_usable():
                    return
            record = self._pending[key] = pack(block, payload)
            self._pending_bytes += len(record)
            self._changed.notify_all()

    def drop(self) -> None:
        """Count a block that is not saved."""
        with self._changed:
            self._counts["dropped"] += 1

    @property
    def key(self) -> bytes:
        """Secret key of the digests, the same after a restart and for all engines of the folder."""
        return self._folder.key

    @property
    def capacity(self) -> int:
        """Limit of the bytes of records."""
        return self._live_bytes

    def touch(self, blocks: Iterable[StoredBlock]) -> None:
        """Mark the blocks that are on disk as used, in this order, once all queued writes are done."""
        self.flush()
        with self._changed:
            for block in blocks:
                key = record_key(self._identity, block)
                self._touched.pop(key, None)
                self._touched[key] = None

    def reset(self) -> None:
        """Hide all records of this model, in constant time; the writer then deletes them, for all engines.

        Records that are not yet deleted when the process is killed are found again after a restart.
        """
        with self._changed:
            self._num_resets += 1
            self._pending, self._pending_bytes, self._touched = {}, 0, {}
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all queued writes and deletions are done."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._has_work() or self._is_writing))

    def close(self) -> None:
        """Complete the queued writes, and close the folder; further calls do nothing."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._changed.notify_all()
        self._writer.join()
        if self._file is not None:
            self._read_sizes()
            self._file.close(is_sound=not self._is_broken)
            self._file = None
        self._folder.close()

    @property
    def stats(self) -> StoreStats:
        """Counters since the start, and the present size."""
        counts = self._counts
        self._read_sizes()
        return StoreStats(
            num_blocks=self._sizes.num_own,
            num_bytes=self._sizes.num_bytes,
            num_foreign=self._sizes.num_foreign,
            num_hits=counts["hits"],
            num_misses=counts["misses"],
            loaded_bytes=counts["bytes"],
            load_s=self._load_s,
            num_saved=counts["saved"],
            num_deleted=counts["deleted"],
            num_dropped=counts["dropped"],
            num_damaged=counts["damaged"],
            num_full=counts["full"],
        )

    @property
    def load_rate(self) -> float | None:
        """Bytes loaded per second; None before the first load."""
        return self._counts["bytes"] / self._load_s if self._counts["bytes"] and self._load_s else None

    # ---- the writer's thread ----

    def _write_on(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._has_work() or self._is_closing)
                job = self._take_job()
                is_last = self._is_closing and not self._has_work()
                self._is_writing = True
            if not job.batch.is_empty and not self._is_broken:
                self._run(job)
            if is_last and (self._is_broken or not self._has_work()):
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()
                return

    def _take_job(self) -> _Job:
        """Return the next transaction; after a transaction that found no room, it only frees space."""
        num_resets = self._num_resets
        if self._must_forget() and (self._pending or not self._has_kept):
            return _Job(WriteBatch(forgotten=self._identity), num_resets)
        if self._is_stuck:
            return _Job(WriteBatch(freed_bytes=self._live_bytes // 8), num_resets)
        records: dict[bytes, bytearray] = {}
        num_bytes = 0
        for key, record in self._pending.items():
            num_bytes += bytes_on_disk(record)
            if records and num_bytes > self._batch_bytes:
                break
            records[key] = record
        for key, record in records.items():
            del self._pending[key]
            self._pending_bytes -= len(record)
        removed, self._damaged = self._damaged, []
        touched, self._touched = tuple(self._touched), {}
        self._being_written = records
        return _Job(WriteBatch(removed, None, 0, touched, records, self._live_bytes), num_resets)

    def _run(self, job: _Job) -> None:
        """Write one transaction; where there is no room, drop its records and free space."""
        for key, record in job.batch.records.items():
            seal(key, record)
        try:
            assert self._file is not None
            written = self._file.write(job.batch)
        except (StoreFull, TimeoutError) as error:
            self._give_up(job, error)
        except (StoreDamaged, OSError) as error:
            self._break(error)
        else:
            with self._changed:
                self._note(job, written)
        self._being_written = {}

    def _note(self, job: _Job, written: Written) -> None:
        """Update counters and state after a transaction."""
        self._counts["saved"] += written.num_added
        self._counts["deleted"] += len(written.evicted)
        self._report_deleted(written.evicted)
        if job.num_resets == self._num_resets:
            self._report_stored(job.batch.records)
        self._hidden.difference_update(job.batch.removed)
        self._is_stuck = self._has_kept = False
        if job.batch.forgotten is not None and written.num_forgotten < job.batch.most_forgotten:
            self._num_forgotten = job.num_resets

    def _give_up(self, job: _Job, error: Exception) -> None:
        """Drop the records of a failed transaction and free space; where that failed before, drop the queue as well."""
        with self._changed:
            if not self._counts["full"]:
                logger.warning("the prefix cache on disk cannot be written, the engine goes on without: %s", error)
            self._counts["full"] += 1
            self._counts["dropped"] += len(job.batch.records)
            self._has_kept = job.batch.forgotten is not None
            if self._is_stuck or self._has_kept or isinstance(error, TimeoutError):
                self._counts["dropped"] += len(self._pending)
                self._pending, self._pending_bytes = {}, 0
                self._is_stuck = False
            else:
                self._is_stuck = True

    # ---- either thread ----

    def _break(self, error: Exception) -> None:
        """Stop using the damaged file; the next engine that opens it alone renames it."""
        with self._changed:
            if not self._is_broken:
                logger.warning("the prefix cache on disk is damaged, the engine goes on without: %s", error)
                self._counts["damaged"] += 1
            self._is_broken = True
            self._pending, self._pending_bytes, self._touched, self._damaged = {}, 0, {}, []
            self._folder.abandon()
            self._changed.notify_all()

    def _has(self, key: bytes) -> bool:
        if not self._is_readable() or self._file is None or key in self._hidden:
            return False
        try:
            return self._file.holds(key)
        except StoreDamaged as error:
            self._break(error)
            return False

    def _read_sizes(self) -> None:
        """Read the present size; it keeps its last value once the file cannot be used."""
        if self._file is not None and not self._is_broken:
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

    def _has_work(self) -> bool:
        """Return whether the writer has something to do; the caller has the lock."""
        must_forget = self._must_forget() and not self._has_kept
        return not self._is_broken and bool(self._pending or self._damaged or self._is_stuck or must_forget)

    def _must_forget(self) -> bool:
        return self._num_resets != self._num_forgotten

    def _is_readable(self) -> bool:
        return self._is_usable() and not self._must_forget()

    def _is_usable(self) -> bool:
        return not (self._is_broken or self._is_closing)


class _Job(NamedTuple):
    """One transaction.

    Args:
        batch: changes of the transaction.
        num_resets: number of resets of the store when the transaction was taken.
    """

    batch: WriteBatch
    num_resets: int
