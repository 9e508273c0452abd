"""Records on their way to a store: queued by the engine's thread, and written in batches by a thread.

```
 engine's thread    put -> pending --.      touch, remove, reset --.
 writer's thread                     '-> batch, sealed <-----------'  -> store
```
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from enum import Enum, auto
from time import monotonic
from typing import Final

from quire.distributed.kvstore.counters import SourceCounters
from quire.distributed.kvstore.record import pack, seal
from quire.distributed.kvstore.sources import WriteBatch
from quire.memory.results import StoredBlock

MOST_PENDING_BYTES: Final = 64 << 20


class StoreState(Enum):
    """State of a store, which decides the next batch."""

    READY = auto()
    # The last batch found no room, so space is freed before the next.
    FULL = auto()
    # The deletion of a reset failed: it is retried with the next record.
    KEEPING = auto()
    # The store is damaged: nothing is read or written any more.
    BROKEN = auto()


class WriteQueue:
    """Pending changes of a store; the queue's thread makes them by `write`, which handles its errors.

    Attributes:
        changed: the lock of all attributes; notified of each change.
        state: see `StoreState`; the store sets it.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[WriteBatch], None],
        identity: bytes,
        counters: SourceCounters,
        *,
        # Greatest number of bytes of a batch with several records, by their sizes in the store.
        batch_bytes: int,
        size_of: Callable[[bytearray], int] = len,
        # Limit of the bytes of all records in the store.
        limit_bytes: int | None = None,
        # Longest time after which uses are written without a record; None to await the next record.
        period_s: float | None = None,
    ) -> None:
        self.changed = threading.Condition()
        self.state = StoreState.READY
        self._write, self._identity, self._counters = write, identity, counters
        self._batch_bytes, self._size_of, self._limit_bytes = batch_bytes, size_of, limit_bytes
        self._period_s = period_s
        self._pending: dict[bytes, bytearray] = {}
        self._pending_bytes = 0
        self._touched: dict[bytes, None] = {}
        self._removed: list[bytes] = []
        self._batch: WriteBatch | None = None
        # Counters of resets and of completed ones; records are hidden until all older ones have been deleted.
        self._num_resets = self._num_forgotten = 0
        self._close_by_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # ---- the engine's thread ----

    def __contains__(self, key: bytes) -> bool:
        """Return whether a record is queued, or being written."""
        batch = self._batch
        return key in self._pending or (batch is not None and key in batch.records)

    def put(self, key: bytes, block: StoredBlock, payload: memoryview, room_s: float | None = 0.0) -> None:
        """Queue a block, whose bytes are copied; it is dropped if the queue has no room for `room_s` seconds."""

        def has_room() -> bool:
            return not self._pending or self._pending_bytes + len(payload) <= MOST_PENDING_BYTES

        with self.changed:
            # A wait of no time would still hand the lock to the writer.
            if not has_room() and (room_s == 0.0 or not self.changed.wait_for(has_room, room_s)):
                self._counters.num_dropped += 1
            elif self.is_open:
                record = self._pending[key] = pack(block, payload)
                self._pending_bytes += len(record)
                self.changed.notify_all()

    def drop(self) -> None:
        """Count a block that is not saved."""
        with self.changed:
            self._counters.num_dropped += 1

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark records as used, in this order, with the next batch."""
        with self.changed:
            for key in keys:
                self._touched.pop(key, None)
                self._touched[key] = None

    def remove(self, key: bytes) -> None:
        """Delete a record."""
        with self.changed:
            self._removed.append(key)
            self.changed.notify_all()

    def reset(self) -> None:
        """Hide all records of the identity, in constant time; the thread then deletes them.

        Records that are not yet deleted when the process is killed are found again after a restart.
        """
        with self.changed:
            self._num_resets += 1
            self._pending, self._pending_bytes, self._touched = {}, 0, {}
            self.changed.notify_all()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all queued changes are written or dropped; return False on a timeout."""
        with self.changed:
            return self.changed.wait_for(lambda: self._batch is None and not self._has_work(), timeout_s)

    def close(self, timeout_s: float = threading.TIMEOUT_MAX, more_s: float = 0.0) -> bool:
        """Write queued changes within a time limit, plus `more_s` for the last batch; False if closed before."""
        with self.changed:
            if self._close_by_s is not None:
                return False
            self._close_by_s = monotonic() + timeout_s
            self.changed.notify_all()
        self._thread.join(min(timeout_s + more_s, threading.TIMEOUT_MAX))
        return True

    @property
    def is_open(self) -> bool:
        """Whether the store is neither broken nor closed."""
        return self.state is not StoreState.BROKEN and not self.is_closing

    @property
    def is_closing(self) -> bool:
        """Whether `close` was called."""
        return self._close_by_s is not None

    @property
    def is_hidden(self) -> bool:
        """Whether records of the time before a reset may still be in the store."""
        return self._num_resets != self._num_forgotten

    # ---- the writer's thread, and errors ----

    def is_current(self, batch: WriteBatch) -> bool:
        """Return whether no reset came after a batch was made."""
        return batch.num_resets == self._num_resets

    def forgot(self, num_resets: int | None = None) -> None:
        """Note that all records before so many resets are deleted; None to give up deleting any."""
        self._num_forgotten = self._num_resets if num_resets is None else num_resets

    def discard(self) -> None:
        """Drop the queued records, and count them; for a broken store, drop all queued changes without counting."""
        with self.changed:
            if self.state is StoreState.BROKEN:
                self._touched, self._removed = {}, []
            else:
                self._counters.num_dropped += len(self._pending)
            self._pending, self._pending_bytes = {}, 0
            self.changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Wait before the next batch, unless the queue is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_closing, seconds)

    def _run(self) -> None:
        while True:
            with self.changed:
                self._batch = None
                self.changed.notify_all()
                if self._close_by_s is not None and (
                    monotonic() > self._close_by_s or not (self._has_work() or self._touched)
                ):
                    return
                self.changed.wait_for(lambda: self._has_work() or self.is_closing, self._period_s)
                batch = self._batch = self._take()
            for key, record in batch.records.items():
                seal(key, record)
            if not batch.is_empty and self.state is not StoreState.BROKEN:
                self._write(batch)

    def _has_work(self) -> bool:
        """Return whether there is something to write, besides uses; the caller has the lock."""
        if self.state is StoreState.BROKEN:
            return False
        must_forget = self.is_hidden and self.state is not StoreState.KEEPING
        return bool(self._pending or self._removed or self.state is StoreState.FULL or must_forget)

    def _take(self) -> WriteBatch:
        """Return the next batch, which is taken out of the queue; the caller has the lock."""
        num_resets, state = self._num_resets, self.state
        if self.is_hidden and (self._pending or state is not StoreState.KEEPING):
            return WriteBatch(forgotten=self._identity, num_resets=num_resets)
        if state is StoreState.FULL and self._limit_bytes is not None:
            return WriteBatch(freed_bytes=self._limit_bytes // 8, num_resets=num_resets)
        records: dict[bytes, bytearray] = {}
        num_bytes = 0
        for key, record in self._pending.items():
            num_bytes += self._size_of(record)
            if records and num_bytes > self._batch_bytes:
                break
            records[key] = record
        for key, record in records.items():
            del self._pending[key]
            self._pending_bytes -= len(record)
        removed, self._removed = self._removed, []
        touched, self._touched = tuple(self._touched), {}
        return WriteBatch(removed, None, 0, touched, records, self._limit_bytes, 0, num_resets)
