"""The remote prefix cache: published blocks in a store such as Valkey or Redis, shared by engines of several hosts.

```
 engine's thread    ask which, ask for records -> SourcePool --.
                    save -> pending --.                         '--> store
 writer's thread                      '-> batch, sealed, with a time to live --^
```

A store that is slow, hangs or is unreachable causes misses: the engine's thread never waits for it. A record is used
only where checksum, tokens and parent match, as for the disk.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import NamedTuple

from quire.distributed.kvstore.circuit_breaker import CircuitBreaker
from quire.distributed.kvstore.record import IDENTITY_BYTES, pack, record_bytes, record_key, seal
from quire.distributed.kvstore.remote.redis_connection import RedisConnection, RefusedAuth, import_redis
from quire.distributed.kvstore.remote.remote_stats import RemoteStats
from quire.distributed.kvstore.source_pool import Inquiry, SourcePool
from quire.errors import ConfigError
from quire.memory.results import StoredBlock

logger = logging.getLogger(__name__)

NUM_READERS = 2
MOST_PENDING_BYTES = 64 << 20
BATCH_BYTES = 4 << 20
# Greatest number of keys that are remembered as being in the store.
MOST_KNOWN = 1 << 16
CLOSE_S = 10.0
# Names in the store begin with this prefix, followed by the identity in hexadecimal digits.
NAME_PREFIX = b"quire:kv:"


class RemoteSettings(NamedTuple):
    """Settings of a remote store.

    Args:
        url: address.
        timeout_s: time limit of connecting, and of a call.
        ttl_s: time to live of a record without use; None for no limit.
    """

    url: str
    timeout_s: float
    ttl_s: float | None


class RemoteStore:
    """Blocks in a remote store, by their digests.

    Only the engine's thread calls the methods.

    Args:
        settings: address and limits.
        identity: see `PrefixStore`.
        block_bytes: bytes of the largest block.

    Attributes:
        num_late, num_refused, load_s, num_hits, num_misses, loaded_bytes, num_damaged: see `RemoteStats`; most are
            counted by the callers.

    Raises:
        ConfigError: the client library is not installed, the address is malformed, or the store refuses the user or the
            password. A store that cannot be reached is no error: it may be reachable later.
    """

    def __init__(self, settings: RemoteSettings, identity: bytes, block_bytes: int) -> None:
        assert len(identity) == IDENTITY_BYTES
        import_redis()
        self._settings = settings
        self._identity = identity
        self._record_bytes = record_bytes(block_bytes)
        self._prefix = NAME_PREFIX + identity.hex().encode() + b":"
        self._breaker = CircuitBreaker()
        try:
            self._connect().close()
        except RefusedAuth as error:
            raise ConfigError(
                f"prefix_cache_url: the store refuses the user or the password: {error}", field="prefix_cache_url"
            ) from error
        except ConfigError:
            raise
        except Exception as error:
            logger.warning("the remote prefix cache cannot be reached, the engine goes on without: %s", error)
            self._breaker.failed()
        self.num_late = self.num_refused = self.num_hits = self.num_misses = self.num_damaged = 0
        self.loaded_bytes, self.load_s = 0, 0.0
        self._num_saved = self._num_dropped = self._num_failures = 0
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._pending: dict[bytes, bytearray] = {}
        self._pending_bytes = 0
        self._touched: dict[bytes, None] = {}
        self._num_resets = self._num_forgotten = 0
        self._is_closing = self._is_writing = False
        self._close_by_s = 0.0
        self._changed = threading.Condition()
        self._pool = SourcePool("remote-cache", self._connect, settings.timeout_s, NUM_READERS, self._breaker)
        self._writer = threading.Thread(target=self._write_on, name="remote-cache-writer", daemon=True)
        self._writer.start()

    # ---- the engine's thread ----

    def ask(self, blocks: Sequence[StoredBlock], *, with_records: bool) -> Inquiry | None:
        """Ask which of the blocks the store has, or for their records; None where the store is not used now.

        Args:
            blocks: the blocks.
            with_records: True to read the records.
        """
        inquiry = Inquiry([record_key(self._identity, block) for block in blocks], with_records=with_records)
        if self._is_hidden or not self._pool.ask(inquiry):
            self.num_refused += 1
            return None
        return inquiry

    def abandon(self, inquiry: Inquiry) -> None:
        """Stop waiting for an answer."""
        self._pool.abandon(inquiry)

    def note(self, inquiry: Inquiry) -> None:
        """Record which blocks the store lacks according to an answer, and mark those that it sent as used."""
        with self._changed:
            for key in inquiry.keys:
                if key not in inquiry.found and inquiry.error is None and not inquiry.is_abandoned:
                    self._known.pop(key, None)
                elif inquiry.with_records and key in inquiry.found:
                    self._touched[key] = None

    def knows(self, block: StoredBlock) -> bool:
        """Return whether a block is known to be in the store, or queued for writing."""
        key = record_key(self._identity, block)
        return key in self._known or key in self._pending

    def save(self, block: StoredBlock, payload: memoryview) -> None:
        """Queue a block for writing; it is dropped where the queue is full, or the circuit is open.

        Args:
            block: identity of the block.
            payload: bytes of the block, which are copied before this returns.
        """
        key = record_key(self._identity, block)
        with self._changed:
            if self._is_closing or key in self._known or key in self._pending:
                return
            if self._breaker.is_open or self._pending_bytes + len(payload) > MOST_PENDING_BYTES:
                self._num_dropped += 1
                return
            record = self._pending[key] = pack(block, payload)
            self._pending_bytes += len(record)
            self._changed.notify_all()

    def drop(self) -> None:
        """Count a block that is not saved."""
        with self._changed:
            self._num_dropped += 1

    def has_room(self, timeout_s: float) -> bool:
        """Wait until the queue has room, or the circuit is open; return False on a timeout."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._breaker.is_open or self._pending_bytes < MOST_PENDING_BYTES // 2, timeout_s
            )

    def reset(self) -> None:
        """Hide all records of this model, in constant time; the writer then deletes them, for all engines."""
        with self._changed:
            self._num_resets += 1
            self._pending, self._pending_bytes = {}, 0
            self._touched, self._known = {}, OrderedDict()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued writes and deletions are done, or dropped; return False on a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._pending or self._is_hidden or self._is_writing), timeout_s)

    def close(self) -> None:
        """Complete the queued writes, as far as `CLOSE_S` allows; further calls do nothing."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._close_by_s = monotonic() + CLOSE_S
            self._changed.notify_all()
        self._writer.join(CLOSE_S + 2 * self._settings.timeout_s)
        self._pool.close()

    @property
    def stats(self) -> RemoteStats:
        """Counters since the start."""
        return RemoteStats(
            num_hits=self.num_hits,
            num_misses=self.num_misses,
            loaded_bytes=self.loaded_bytes,
            load_s=self.load_s,
            num_late=self.num_late,
            num_refused=self.num_refused,
            num_failures=self._num_failures + self._pool.num_failures,
            num_damaged=self.num_damaged,
            num_saved=self._num_saved,
            num_dropped=self._num_dropped,
            is_open=int(self._breaker.is_open),
        )

    @property
    def _is_hidden(self) -> bool:
        return self._num_resets != self._num_forgotten

    # ---- the other threads ----

    def _connect(self) -> RedisConnection:
        return RedisConnection(self._settings.url, self._settings.timeout_s, self._record_bytes, self._name_of)

    def _name_of(self, key: bytes) -> bytes:
        return self._prefix + key[IDENTITY_BYTES:].hex().encode()

    def _write_on(self) -> None:
        connection: RedisConnection | None = None
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                # Uses are written with the next records, or once a second.
                self._changed.wait_for(lambda: self._pending or self._is_hidden or self._is_closing, 1.0)
                is_over = self._is_closing and (not self._pending or monotonic() > self._close_by_s)
                num_resets, records, touched = self._take_batch()
                self._is_writing = True
            if is_over:
                break
            if not (records or touched or self._is_hidden):
                continue
            if not self._breaker.allows():
                self._drop(records)
                with self._changed:
                    # Where records are to be deleted, a store that failed is retried after a short wait.
                    self._changed.wait_for(lambda: self._is_closing, 0.2)
                continue
            try:
                connection = connection or self._connect()
                self._write(connection, num_resets, records, touched)
                self._breaker.succeeded()
            # The client library raises errors of any kind where the answer violates the protocol.
            except Exception as error:
                if not self._num_failures:
                    logger.warning("the remote prefix cache has failed, the engine goes on without: %s", error)
                self._num_failures += 1
                self._breaker.failed()
                self._drop(records)
                if connection is not None:
                    connection.close()
                connection = None
        if connection is not None:
            connection.close()

    def _take_batch(self) -> tuple[int, dict[bytes, bytearray], list[bytes]]:
        """Return the number of resets, and the records and uses to write next; the caller has the lock."""
        records: dict[bytes, bytearray] = {}
        num_bytes = 0
        for key, record in self._pending.items():
            num_bytes += len(record)
            if records and num_bytes > BATCH_BYTES:
                break
            records[key] = record
        for key, record in records.items():
            del self._pending[key]
            self._pending_bytes -= len(record)
        touched, self._touched = list(self._touched), {}
        return self._num_resets, records, touched

    def _write(
        self, connection: RedisConnection, num_resets: int, records: dict[bytes, bytearray], touched: list[bytes]
    ) -> None:
        if num_resets != self._num_forgotten:
            connection.delete(self._prefix + b"*")
            self._num_forgotten = num_resets
        ttl_s = self._settings.ttl_s
        if touched and ttl_s is not None:
            connection.prolong(touched, ttl_s)
        if records:
            for key, record in records.items():
                seal(key, record)
            self._num_saved += connection.write(records, ttl_s)
            with self._changed:
                if num_resets == self._num_resets:
                    self._learn(records)

    def _learn(self, keys: Iterable[bytes]) -> None:
        """Remember that the store has records; the caller has the lock."""
        for key in keys:
            self._known[key] = None
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def _drop(self, records: dict[bytes, bytearray]) -> None:
        with self._changed:
            self._num_dropped += len(records)
