"""Blocks of finished prompts that other engines may fetch: records in memory, for a while."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from quire.kvstore.record import pack, seal
from quire.memory.results import StoredBlock


class Export(NamedTuple):
    """A record that other engines may fetch.

    Args:
        record: its bytes, with their checksum.
        expires_s: time at which it is dropped.
    """

    record: bytearray
    expires_s: float


class ExportTable:
    """Records by their keys, up to a number of bytes and an age; the oldest make room. Any thread may call it.

    Args:
        max_bytes: limit of the records' bytes.
        ttl_s: age at which a record is dropped.
        clock: clock in seconds.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._exports: OrderedDict[bytes, Export] = OrderedDict()
        self._num_bytes = 0

    def put(self, key: bytes, block: StoredBlock, payload: memoryview) -> None:
        """Add a record, or prolong its life; it is left out where it alone is too large."""
        with self._lock:
            known = self._exports.pop(key, None)
            if known is not None:
                self._num_bytes -= len(known.record)
                record = known.record
            else:
                record = pack(block, payload)
                seal(key, record)
            self._make_room(len(record))
            if len(record) <= self._max_bytes:
                self._exports[key] = Export(record, self._clock() + self._ttl_s)
                self._num_bytes += len(record)

    def get(self, key: bytes) -> bytearray | None:
        """Return a record, None where there is none."""
        with self._lock:
            self._make_room(0)
            found = self._exports.get(key)
            return None if found is None else found.record

    def reset(self) -> None:
        """Drop all records."""
        with self._lock:
            self._exports.clear()
            self._num_bytes = 0

    close = reset

    @property
    def num_bytes(self) -> int:
        """Bytes of all records."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._exports)

    def _make_room(self, num_bytes: int) -> None:
        """Drop records whose time is over, and the oldest until so many bytes fit; the caller has the lock."""
        now = self._clock()
        while self._exports:
            key, export = next(iter(self._exports.items()))
            if export.expires_s > now and self._num_bytes + num_bytes <= self._max_bytes:
                return
            del self._exports[key]
            self._num_bytes -= len(export.record)
