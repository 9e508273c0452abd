"""The tables of a durable prefix cache, and the changes of one transaction.

```
 records   key            -> record
 uses      key            -> moment of the last use, bytes on disk
 order     moment         -> key               the least recently used record is the first
 totals    identity       -> number of records, bytes on disk
 meta      "limit", "moment"                   largest size of the file; latest moment
```

A moment is a logical time: a counter that every use of a record, by any engine, increments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from struct import Struct
from typing import Any, NamedTuple

from quire.distributed.kvstore.record import IDENTITY_BYTES
from quire.distributed.kvstore.sources import WriteBatch, Written

RECORDS, USES, ORDER, TOTALS, META = b"records", b"uses", b"order", b"totals", b"meta"
TABLES = (RECORDS, USES, ORDER, TOTALS, META)
LIMIT, MOMENT = b"limit", b"moment"
NUMBER = Struct(">Q")
_PAIR = Struct("<QQ")


class StoreSizes(NamedTuple):
    """The size of a store.

    Args:
        num_own: number of records of one identity.
        num_foreign: number of other records.
        num_bytes: bytes on disk of all records.
    """

    num_own: int
    num_foreign: int
    num_bytes: int


def bytes_on_disk(record: bytearray) -> int:
    """Return the size of a record in pages of 4096 bytes, its part of the tables included."""
    return -(-(len(record) + 16) // 4096) * 4096 + 512


class Transaction:
    """The tables as one transaction sees them."""

    def __init__(self, txn: Any, tables: Mapping[bytes, Any]) -> None:
        self._txn = txn
        self._tables = tables
        self._totals = {key: _PAIR.unpack(value) for key, value in txn.cursor(db=tables[TOTALS])}
        moment = txn.get(MOMENT, db=tables[META])
        self._moment: int = NUMBER.unpack(moment)[0] if moment else 0

    def sizes(self, identity: bytes) -> StoreSizes:
        """Return the size of the store."""
        num_own = self._totals.get(identity, (0, 0))[0]
        num_all = sum(count for count, _ in self._totals.values())
        return StoreSizes(num_own, num_all - num_own, self._num_bytes)

    def apply(self, batch: WriteBatch) -> Written:
        """Make the changes of a batch."""
        for key in batch.removed:
            self._remove(key)
        num_forgotten = 0
        if batch.forgotten is not None:
            for key in list(self._keys_of(batch.forgotten, batch.most_forgotten)):
                num_forgotten += self._remove(key)
        for key in batch.touched:
            self._touch(key)
        new = {key: record for key, record in batch.records.items() if not self._touch(key)}
        evicted = self._evict(self._num_bytes - batch.freed_bytes) if batch.freed_bytes else []
        if batch.most_bytes is not None:
            evicted += self._evict(batch.most_bytes - sum(map(bytes_on_disk, new.values())))
        for key, record in new.items():
            self._txn.put(key, record, db=self._tables[RECORDS])
            self._add_use(key, bytes_on_disk(record))
            self._count(key, 1, bytes_on_disk(record))
        self._write_counts()
        return Written(len(new), tuple(evicted), num_forgotten)

    @property
    def _num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self._totals.values())

    def _keys_of(self, identity: bytes, most: int) -> Iterator[bytes]:
        cursor = self._txn.cursor(db=self._tables[USES])
        if cursor.set_range(identity):
            for _, key in zip(range(most), cursor.iternext(keys=True, values=False), strict=False):
                if not key.startswith(identity):
                    return
                yield key

    def _evict(self, most_bytes: int) -> list[bytes]:
        """Delete the least recently used records until no more than `most_bytes` are left; return their keys."""
        evicted: list[bytes] = []
        while self._num_bytes > most_bytes:
            cursor = self._txn.cursor(db=self._tables[ORDER])
            if not cursor.first():
                break
            key = cursor.value()
            if self._remove(key):
                evicted.append(key)
            else:
                # Damage: an entry of `order` without a record would stay the first forever.
                cursor.delete()
        return evicted

    def _remove(self, key: bytes) -> bool:
        num_bytes = self._leave_order(key)
        if num_bytes is None:
            return False
        self._txn.delete(key, db=self._tables[USES])
        self._txn.delete(key, db=self._tables[RECORDS])
        self._count(key, -1, -num_bytes)
        return True

    def _touch(self, key: bytes) -> bool:
        """Mark a record as the most recently used; return False for an unknown key."""
        num_bytes = self._leave_order(key)
        if num_bytes is None:
            return False
        self._add_use(key, num_bytes)
        return True

    def _leave_order(self, key: bytes) -> int | None:
        """Delete a record's last use from `order`; return its bytes on disk, None for an unknown key."""
        use = self._txn.get(key, db=self._tables[USES])
        if use is None:
            return None
        moment, num_bytes = _PAIR.unpack(use)
        self._txn.delete(NUMBER.pack(moment), db=self._tables[ORDER])
        return int(num_bytes)

    def _add_use(self, key: bytes, num_bytes: int) -> None:
        self._moment += 1
        self._txn.put(key, _PAIR.pack(self._moment, num_bytes), db=self._tables[USES])
        self._txn.put(NUMBER.pack(self._moment), key, db=self._tables[ORDER])

    def _count(self, key: bytes, count: int, num_bytes: int) -> None:
        identity = key[:IDENTITY_BYTES]
        old_count, old_bytes = self._totals.get(identity, (0, 0))
        self._totals[identity] = (max(0, old_count + count), max(0, old_bytes + num_bytes))

    def _write_counts(self) -> None:
        for identity, total in self._totals.items():
            if total[0]:
                self._txn.put(identity, _PAIR.pack(*total), db=self._tables[TOTALS])
            else:
                self._txn.delete(identity, db=self._tables[TOTALS])
        self._txn.put(MOMENT, NUMBER.pack(self._moment), db=self._tables[META])


def find_problem(txn: Any, tables: Mapping[bytes, Any]) -> str | None:
    """Return the first inconsistency of the tables, or None: LMDB has no checksums of its pages."""
    uses = {key: _PAIR.unpack(value) for key, value in txn.cursor(db=tables[USES])}
    order = {key: NUMBER.unpack(moment)[0] for moment, key in txn.cursor(db=tables[ORDER])}
    if order != {key: moment for key, (moment, _) in uses.items()}:
        return "the order of the records is not that of their uses"
    moment = txn.get(MOMENT, db=tables[META])
    if max(order.values(), default=0) > (NUMBER.unpack(moment)[0] if moment else 0):
        return "a record was used later than any"
    totals: dict[bytes, tuple[int, int]] = {}
    for key, (_, num_bytes) in uses.items():
        count, total = totals.get(key[:IDENTITY_BYTES], (0, 0))
        totals[key[:IDENTITY_BYTES]] = (count + 1, total + num_bytes)
    if totals != {key: _PAIR.unpack(value) for key, value in txn.cursor(db=tables[TOTALS])}:
        return "the totals are not those of the records"
    if txn.stat(db=tables[RECORDS])["entries"] != len(uses):
        return "there is another number of records than of their uses"
    return None
