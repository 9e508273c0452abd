"""Blocks of finished prompts that other engines may fetch: records in memory, with a time to live.

A prompt of an 8B model may have a gigabyte of blocks, still in transit from a GPU behind a running step. So the engine
neither waits for them nor computes checksums: a thread makes the records, and a reader waits for its record.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from quire.distributed.kvstore.arriving import ArrivingBytes, bytes_of
from quire.distributed.kvstore.record import pack, seal, size_of
from quire.memory.results import StoredBlock

logger = logging.getLogger(__name__)

# Longest wait for the thread when the table is closed, in seconds.
JOIN_S = 5.0


class Export:
    """A record that other engines may fetch."""

    __slots__ = ("data", "expires_s", "is_settled", "num_bytes", "record")

    def __init__(self, num_bytes: int, expires_s: float, data: ArrivingBytes | bytearray) -> None:
        self.num_bytes, self.expires_s = num_bytes, expires_s
        self.data: ArrivingBytes | bytearray | None = data
        self.record: bytearray | None = None
        self.is_settled = False


class UnsealedExport(NamedTuple):
    """A record that the thread has yet to make.

    Args:
        key: key of the record.
        export: table entry that gets the record.
        block: identity of the block.
    """

    key: bytes
    export: Export
    block: StoredBlock


class ExportTable:
    """Records by key, with a byte limit and a time to live; the oldest are dropped first. Any thread may call it.

    Args:
        max_bytes: limit of the records' bytes, unfinished records included.
        ttl_s: age at which a record is dropped.
        clock: clock in seconds.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._changed = threading.Condition()
        self._exports: OrderedDict[bytes, Export] = OrderedDict()
        self._unsealed: deque[UnsealedExport] = deque()
        self._num_bytes = 0
        self._sealer: threading.Thread | None = None
        self._is_closed = False

    def put(self, key: bytes, block: StoredBlock, payload: memoryview) -> None:
        """Add a block, whose bytes are copied here, or renew its time to live.

        A block that alone exceeds the limit is not added.
        """
        self._put(key, block, len(payload), lambda: pack(block, payload))

    def put_arriving(self, key: bytes, block: StoredBlock, num_bytes: int, fetch: Callable[[], ArrivingBytes]) -> None:
        """Add a block whose bytes arrive later; see `put`.

        Args:
            key: key of the record.
            block: identity of the block.
            num_bytes: number of its bytes.
            fetch: function that begins to fetch the bytes, which do not change once they have arrived.
        """
        self._put(key, block, num_bytes, fetch)

    def _put(
        self, key: bytes, block: StoredBlock, payload_bytes: int, take: Callable[[], ArrivingBytes | bytearray]
    ) -> None:
        with self._changed:
            known = self._exports.pop(key, None)
            num_bytes = size_of(block, payload_bytes)
            if known is not None:
                self._num_bytes -= known.num_bytes
            self._make_room(num_bytes)
            if num_bytes > self._max_bytes or self._is_closed:
                return
            expires_s = self._clock() + self._ttl_s
            if known is None:
                known = Export(num_bytes, expires_s, take())
                self._unsealed.append(UnsealedExport(key, known, block))
                if self._sealer is None:
                    self._sealer = threading.Thread(target=self._seal_all, name="kv-exports", daemon=True)
                    self._sealer.start()
                self._changed.notify_all()
            known.expires_s = expires_s
            self._exports[key] = known
            self._num_bytes += num_bytes

    def get(self, key: bytes) -> bytearray | None:
        """Return a record, or None for an unknown key; this waits for a record that is being made."""
        with self._changed:
            self._make_room(0)
            export = self._exports.get(key)
            if export is None:
                return None
            self._changed.wait_for(lambda: export.is_settled, max(0.0, export.expires_s - self._clock()))
            return export.record

    def __contains__(self, key: bytes) -> bool:
        """Return whether the table has a record, or will have it."""
        with self._changed:
            self._make_room(0)
            return key in self._exports

    def reset(self) -> None:
        """Drop all records."""
        with self._changed:
            while self._exports:
                self._drop(next(iter(self._exports)))
            self._unsealed.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Drop all records, and end the thread; later puts are ignored."""
        self.reset()
        with self._changed:
            self._is_closed, sealer = True, self._sealer
            self._changed.notify_all()
        if sealer is not None:
            sealer.join(JOIN_S)

    @property
    def num_bytes(self) -> int:
        """Bytes of all records."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._exports)

    def _seal_all(self) -> None:
        """Make records until the table is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsealed or self._is_closed)
                if self._is_closed:
                    return
                key, export, block = self._unsealed.popleft()
                data, export.data = export.data, None
            if data is None:
                continue
            record: bytearray | None = None
            try:
                record = _sealed(key, block, data)
            except (RuntimeError, MemoryError) as error:  # of the device, or the host; other records may still be made
                logger.warning("a block for other engines is lost: %s", str(error) or "no memory")
            with self._changed:
                if self._exports.get(key) is export:
                    export.record, export.is_settled = record, True
                    if record is None:
                        self._drop(key)
                    self._changed.notify_all()

    def _make_room(self, num_bytes: int) -> None:
        """Drop expired records, and the oldest until `num_bytes` more fit; the caller has the lock."""
        now = self._clock()
        while self._exports:
            key, export = next(iter(self._exports.items()))
            if export.expires_s > now and self._num_bytes + num_bytes <= self._max_bytes:
                return
            self._drop(key)
            self._changed.notify_all()

    def _drop(self, key: bytes) -> None:
        export = self._exports.pop(key)
        export.is_settled, export.data = True, None
        self._num_bytes -= export.num_bytes


def _sealed(key: bytes, block: StoredBlock, data: ArrivingBytes | bytearray) -> bytearray:
    """Return a record with its checksum, from a block's bytes or from the record without its checksum."""
    record = data
    if not isinstance(record, bytearray):
        arrived = record.wait()
        record = pack(block, bytes_of(arrived))
    seal(key, record)
    return record
