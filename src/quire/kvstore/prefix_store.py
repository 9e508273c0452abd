"""The durable prefix cache: published blocks on disk, found again after a restart.

```
 engine's thread    holds?  fetch ---------> StoreFile (mapping)
                    save -> pending --.          ^
 writer's thread                      '-> batch -' one transaction, the oldest records out
```

The engine's thread never waits for writes. An error on disk is a miss and a counter: a record is used only when its
checksum, tokens and parent match.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

from quire.errors import ConfigError
from quire.kvstore.folder import StoreFolder
from quire.kvstore.lmdb_file import StoreDamaged, StoreFile, StoreFull, Use, bytes_on_disk
from quire.kvstore.record import IDENTITY_BYTES, pack, read_key, record_key, seal, unpack
from quire.kvstore.store_stats import StoreStats
from quire.memory.results import StoredBlock

logger = logging.getLogger(__name__)

# Share of the file's bytes for records. The rest is for pages of older committed states, and for gaps.
LIVE_SHARE = 0.75
# A transaction needs as much room again as it writes, so it is a small part of the file.
BATCH_SHARE = 1 / 16
MOST_BATCH_BYTES = 16 << 20
MOST_PENDING_BYTES = 64 << 20


class StoreObserver(Protocol):
    """Listens to what is on disk, group and digest of each block; in either thread, but for resets."""

    def on_stored(self, blocks: Sequence[tuple[int, bytes]]) -> None: ...

    def on_deleted(self, blocks: Sequence[tuple[int, bytes]]) -> None: ...


class PrefixStore:
    """Blocks on disk, by their digests.

    Only the engine's thread calls the methods; a writer thread writes.

    Args:
        folder: locked folder of the cache; closed with the store.
        identity: digest of the model, its weights, and everything else that determines the bytes of a block,
            `IDENTITY_BYTES` bytes.
        max_bytes: largest size of the file; the least recently used records are deleted first.
        block_bytes: bytes of the largest block.
        clock: clock in seconds, to time loads.

    Raises:
        ConfigError: LMDB is not installed, the file cannot be made, or `max_bytes` is too few.
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
        self._file = StoreFile(folder.path / "blocks.mdb", max_bytes)
        self._counts = dict.fromkeys(("hits", "misses", "saved", "deleted", "dropped", "damaged", "full", "bytes"), 0)
        self._counts["damaged"] += self._file.was_damaged
        self._load_s = 0.0
        self.observer: StoreObserver | None = None
        # Keys by last use, the oldest first; foreign keys are never used here, so their order is constant.
        self._own: OrderedDict[bytes, Use] = OrderedDict()
        self._foreign: OrderedDict[bytes, Use] = OrderedDict()
        for key, use in sorted(self._file.uses.items(), key=lambda item: item[1]):
            (self._own if key.startswith(identity) else self._foreign)[key] = use
        self._num_bytes = sum(use.num_bytes for use in self._file.uses.values())
        self._moment = max((use.moment for use in self._file.uses.values()), default=0)
        self._file.uses = {}
        # The writer's work; one lock guards it and the keys above.
        self._pending: dict[bytes, bytearray] = {}
        self._pending_bytes = 0
        self._touched: dict[bytes, Use] = {}
        self._doomed: list[Mapping[bytes, Use]] = []
        self._being_written: dict[bytes, bytearray] = {}
        self._num_resets = 0
        self._is_broken = self._is_stuck = self._is_closing = self._is_writing = self._is_urgent = False
        self._changed = threading.Condition()
        self._writer = threading.Thread(target=self._write_on, name="prefix-store", daemon=True)
        self._writer.start()

    # ---- the engine's thread ----

    def holds(self, block: StoredBlock) -> bool:
        """Return True where the index has a block; the block itself is not read."""
        return self._is_usable() and record_key(self._identity, block) in self._own

    def fetch(self, block: StoredBlock, out: memoryview) -> bool:
        """Read a block's bytes; return False where the record is missing, damaged, or of another block.

        Args:
            block: identity of the block.
            out: destination of the bytes; undefined where the result is False.
        """
        key, started = record_key(self._identity, block), self._clock()
        if not self.holds(block):
            self._counts["misses"] += 1
            return False
        try:
            is_good = self._file.read(key, lambda record: unpack(key, block, record, out))
        except StoreDamaged as error:
            self._break(error)
            return False
        with self._changed:
            use = self._own.pop(key, None)
            if is_good and use is not None:
                self._touch(key, use)
            elif use is not None:
                self._counts["damaged"] += 1
                self._doom({key: use})
                self._report_deleted({key: use})
        self._counts["hits" if is_good else "misses"] += 1
        if is_good:
            self._counts["bytes"] += len(out)
            self._load_s += self._clock() - started
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
            if self.observer is not None and key in self._own:
                self.observer.on_stored([read_key(key)])
            if not self._is_usable() or any(key in known for known in (self._own, self._pending, self._being_written)):
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

    @property
    def key(self) -> bytes:
        """Secret key of the digests, the same after a restart."""
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
                use = self._own.pop(key, None)
                if use is not None:
                    self._touch(key, use)

    def reset(self) -> None:
        """Make all records unreachable, in constant time; the writer then deletes them.

        Records that are not yet deleted when the process is killed are found again after a restart.
        """
        with self._changed:
            self._num_resets += 1
            self._pending, self._pending_bytes, self._touched = {}, 0, {}
            self._doom(self._own)
            self._own = OrderedDict()

    def flush(self) -> None:
        """Wait until all queued writes and deletions are done."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._pending or self._is_urgent or self._is_writing))

    def close(self) -> None:
        """Complete the queued writes, and close the folder; further calls do nothing."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._changed.notify_all()
        self._writer.join()
        self._file.close()
        self._folder.close()

    @property
    def stats(self) -> StoreStats:
        """Counters since the start, and the present size."""
        counts = self._counts
        return StoreStats(
            num_blocks=len(self._own),
            num_bytes=self._num_bytes,
            num_foreign=len(self._foreign),
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

    # ---- the writer's thread ----

    def _write_on(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._pending or self._is_urgent or self._is_closing)
                is_last = self._is_closing and not self._pending
                job = self._take_job()
                self._is_writing = True
            if any((job.records, job.deleted, job.touched)) and not self._is_broken:
                self._run(job)
            if is_last:
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()
                return

    def _take_job(self) -> _Job:
        """Return the next transaction; after a transaction that found no room, it only deletes."""
        records: dict[bytes, bytearray] = {}
        added: dict[bytes, Use] = {}
        num_bytes = 0
        for key, record in () if self._is_stuck and self._doomed else self._pending.items():
            num_bytes += bytes_on_disk(record)
            if records and num_bytes > self._batch_bytes:
                break
            self._moment += 1
            records[key], added[key] = record, Use(self._moment, bytes_on_disk(record))
        for key, record in records.items():
            del self._pending[key]
            self._pending_bytes -= len(record)
        deleted = {key: use for doomed in self._doomed for key, use in doomed.items()}
        self._doomed, self._is_urgent = [], False
        excess = self._num_bytes + _total(added) - _total(deleted) - self._live_bytes
        victims = self._oldest(excess)
        self._counts["deleted"] += len(victims)
        touched = {key: use for key, use in self._touched.items() if key in self._own}
        self._touched = {}
        self._being_written = records
        return _Job(records, added, deleted | victims, touched, self._num_resets)

    def _oldest(self, num_bytes: int) -> dict[bytes, Use]:
        """Remove the least recently used records from the index, at least `num_bytes` of them, and return them."""
        victims: dict[bytes, Use] = {}
        while num_bytes > 0 and (self._own or self._foreign):
            tables = [table for table in (self._own, self._foreign) if table]
            oldest = min(tables, key=lambda table: next(iter(table.values())).moment)
            key, use = oldest.popitem(last=False)
            victims[key] = use
            num_bytes -= use.num_bytes
        self._report_deleted(victims)
        return victims

    def _run(self, job: _Job) -> None:
        """Write one transaction; where there is no room, drop its records and free space."""
        for key, record in job.records.items():
            seal(key, record)
        try:
            self._file.write(job.deleted, job.records, job.touched | job.added)
        except StoreFull as error:
            self._give_up(job, error)
        except (StoreDamaged, OSError) as error:
            self._break(error)
        else:
            with self._changed:
                self._num_bytes += _total(job.added) - _total(job.deleted)
                self._counts["saved"] += len(job.added)
                self._is_stuck = False
                if job.num_resets == self._num_resets:
                    self._own |= job.added
                    if self.observer is not None:
                        self.observer.on_stored([read_key(key) for key in job.added])
                else:
                    self._doom(job.added)
        self._being_written = {}

    def _give_up(self, job: _Job, error: StoreFull) -> None:
        """Drop the records of a failed transaction and free space; where that failed before, drop the queue as well."""
        with self._changed:
            if not self._counts["full"]:
                logger.warning("the prefix cache on disk is full, the engine goes on without: %s", error)
            self._counts["full"] += 1
            self._counts["dropped"] += len(job.records)
            if self._is_stuck:
                self._counts["dropped"] += len(self._pending)
                self._pending, self._pending_bytes = {}, 0
                self._doomed.append(job.deleted)
            else:
                self._is_stuck = True
                self._doom(job.deleted | self._oldest(self._live_bytes // 8))

    # ---- either thread ----

    def _break(self, error: Exception) -> None:
        """Stop using the file; it is renamed when it is opened next."""
        with self._changed:
            if not self._is_broken:
                logger.warning("the prefix cache on disk is damaged, the engine goes on without: %s", error)
                self._counts["damaged"] += 1
            self._is_broken = True
            self._pending, self._pending_bytes, self._is_urgent = {}, 0, False
            self._changed.notify_all()

    # ---- either thread, while it holds the lock ----

    def _touch(self, key: bytes, use: Use) -> None:
        """Mark a record as used most recently."""
        self._moment += 1
        self._own[key] = self._touched[key] = use._replace(moment=self._moment)

    def _report_deleted(self, records: Mapping[bytes, Use]) -> None:
        if self.observer is not None and records:
            self.observer.on_deleted([read_key(key) for key in records if key.startswith(self._identity)])

    def _is_usable(self) -> bool:
        return not (self._is_broken or self._is_closing)

    def _doom(self, records: Mapping[bytes, Use]) -> None:
        """Queue the deletion of records that were removed from the index."""
        self._doomed.append(records)
        self._is_urgent = True
        self._changed.notify_all()


class _Job(NamedTuple):
    """One transaction.

    Args:
        records: records to write.
        added: uses of those records.
        deleted: records to delete first.
        touched: new uses of existing records.
        num_resets: number of resets of the store when the transaction was taken.
    """

    records: dict[bytes, bytearray]
    added: dict[bytes, Use]
    deleted: dict[bytes, Use]
    touched: dict[bytes, Use]
    num_resets: int


def _total(uses: Mapping[bytes, Use]) -> int:
    return sum(use.num_bytes for use in uses.values())
