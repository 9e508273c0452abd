"""Blocks of finished prompts that other engines may fetch: records in memory, with a time to live.

A prompt of an 8B model may have a gigabyte of blocks, whose copies from a GPU start only after the running step. So the
engine neither waits for them nor computes checksums: a thread makes the records, and a reader waits for its record.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from quire.distributed.kvstore.record import ArrivingBytes, bytes_of, pack, seal, size_of
from quire.memory.results import StoredBlock

logger = logging.getLogger(__name__)

# Longest wait for the thread when the table is closed, in seconds.
JOIN_S = 5.0


@dataclass(slots=True, eq=False)
class Export:
    """A record that other engines may fetch."""

    key: bytes
    block: StoredBlock
    num_bytes: int
    expires_s: float
    # Bytes of the block, or the record without its checksum; None once the thread has it, or the record is dropped.
    data: ArrivingBytes | bytearray | None
    # Bytes of the record, with its checksum; None until the thread has made it.
    record: bytearray | None = None
    # True once the record is made, or never will be.
    is_settled: bool = False


class ExportTable:
    """Records by key, with a byte limit and a time to live; the oldest are dropped first. Any thread may call it.

    Args:
        max_bytes: limit of the records' bytes, unfinished records included.
        ttl_s: age at which a record is dropped.
        clock: clock in seconds.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._max_bytes, self._ttl_s, self._clock = max_bytes, ttl_s, clock
        self._changed = threading.Condition()
        self._exports: OrderedDict[bytes, Export] = OrderedDict()
        self._unsealed: deque[Export] = deque()
        self._num_bytes = 0
        self._sealer: threading.Thread | None = None
        self._is_closed = False

    def put(
        self,
        key: bytes,
        block: StoredBlock,
        data: memoryview | Callable[[], ArrivingBytes],
        payload_bytes: int | None = None,
    ) -> None:
        """Add a block, or renew its time to live; a block that alone exceeds the limit is not added.

        Args:
            key: key of the record.
            block: identity of the block.
            data: its bytes, which are copied here; or a function that begins to fetch them: they arrive later, and do
                not change then.
            payload_bytes: number of its bytes; None for all of `data`.
        """
        with self._changed:
            export = self._exports.pop(key, None)
            if isinstance(data, memoryview):
                payload_bytes = len(data)
            num_bytes = size_of(block, payload_bytes or 0)
            if export is not None:
                self._num_bytes -= export.num_bytes
            self._make_room(num_bytes)
            if num_bytes > self._max_bytes or self._is_closed:
                return
            if export is None:
                waiting = pack(block, data) if isinstance(data, memoryview) else data()
                export = Export(key, block, num_bytes, 0.0, waiting)
                self._unsealed.append(export)
                if self._sealer is None:
                    self._sealer = threading.Thread(target=self._seal_all, name="kv-exports", daemon=True)
                    self._sealer.start()
                self._changed.notify_all()
            export.expires_s = self._clock() + self._ttl_s
            self._exports[key] = export
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
                export = self._unsealed.popleft()
                data, export.data = export.data, None
            record: bytearray | None = None
            try:
                if isinstance(data, bytearray):
                    record = data
                elif data is not None:
                    arrived = data.wait()
                    record = pack(export.block, bytes_of(arrived))
                if record is not None:
                    seal(export.key, record)
            except (RuntimeError, MemoryError) as error:  # of the device, or the host; other records may still be made
                logger.warning("a block for other engines is lost: %s", str(error) or "no memory")
                record = None
            with self._changed:
                if self._exports.get(export.key) is export:
                    export.record, export.is_settled = record, True
                    if record is None:
                        self._drop(export.key)
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
