"""The remote prefix cache: published blocks in a store such as Valkey or Redis, shared by engines of several hosts.

```
 engine's thread    ask which, ask for records -> SourcePool --.
                    save -> WriteQueue --.                      '--> store
 writer's thread                         '-> batch, with a time to live --^
```

A store that is slow, hangs or is unreachable causes misses: the engine's thread never waits for it. A record is used
only if checksum, tokens and parent match, as for the disk. The client library of the protocol of Redis is imported only
if a store is configured.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from quire.config.extras import importing_extra
from quire.config.stores import bad_url, client_url
from quire.distributed.kvstore.counters import RemoteStats, SourceCounters
from quire.distributed.kvstore.record import IDENTITY_BYTES, record_bytes, record_key
from quire.distributed.kvstore.sources import CircuitBreaker, Inquiry, Record, SourcePool, WriteBatch, Written
from quire.distributed.kvstore.write_queue import WriteQueue
from quire.errors import ConfigError
from quire.memory.results import StoredBlock

logger = logging.getLogger(__name__)

NUM_READERS = 2
BATCH_BYTES = 4 << 20
# Uses are written with the next records, or after this time.
PERIOD_S = 1.0
# Wait before the next batch while the circuit is open.
RETRY_S = 0.2
# Longest wait for room in the queue, at the shutdown.
ROOM_S = 5.0
# Greatest number of keys that are remembered as being in the store.
MOST_KNOWN = 1 << 16
CLOSE_S = 10.0
# Names in the store begin with this prefix, followed by the identity in hexadecimal digits.
NAME_PREFIX = b"quire:kv:"
# Greatest numbers of keys, and of record bytes, of one round trip.
MOST_KEYS = 1024
ROUND_BYTES = 4 << 20


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


class RefusedAuth(Exception):
    """The store refuses the user, or the password, of the address."""


class StoreOutOfMemory(Exception):
    """The store has no room for a record, and does not evict others."""


class RedisConnection:
    """A connection; one thread uses it at a time."""

    def __init__(self, settings: RemoteSettings, record_bytes: int) -> None:
        redis = import_redis()
        url, timeout_s, ttl_s = settings
        # Milliseconds; None for no limit.
        self._ttl = None if ttl_s is None else max(1, int(ttl_s * 1000))
        self._errors: Any = import_module("redis.exceptions")
        self._record_bytes = record_bytes
        self._round_keys = max(1, min(MOST_KEYS, ROUND_BYTES // record_bytes))
        no_retry = import_module("redis.retry").Retry(import_module("redis.backoff").NoBackoff(), 0)
        try:
            self._client: Any = redis.Redis.from_url(
                client_url(url),
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=no_retry,
                retry_on_timeout=False,
                protocol=2,
                single_connection_client=True,
            )
            self._client.ping()
        except ValueError as error:
            raise bad_url(url, str(error)) from error
        except (self._errors.AuthenticationError, self._errors.NoPermissionError) as error:
            raise RefusedAuth(str(error)) from error
        except self._errors.ResponseError as error:
            if any(word in str(error).upper() for word in ("NOAUTH", "WRONGPASS", "AUTH ")):
                raise RefusedAuth(str(error)) from error
            raise

    def find(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys that the store has."""
        stored_keys: list[bytes] = []
        for start in range(0, len(keys), MOST_KEYS):
            part = keys[start : start + MOST_KEYS]
            with self._client.pipeline(transaction=False) as pipe:
                for key in part:
                    pipe.exists(name_of(key))
                stored_keys += (key for key, is_there in zip(part, pipe.execute(), strict=True) if is_there == 1)
        return stored_keys

    def fetch(self, keys: Sequence[bytes], put: Callable[[bytes, Record], None]) -> None:
        """Pass the records that the store has to `put`, in rounds: the first arrive before the last are requested."""
        for start in range(0, len(keys), self._round_keys):
            part = keys[start : start + self._round_keys]
            with self._client.pipeline(transaction=False) as pipe:
                for key in part:
                    # A range, so that a foreign value takes no more memory than a record.
                    pipe.getrange(name_of(key), 0, self._record_bytes)
                for key, record in zip(part, pipe.execute(), strict=True):
                    if isinstance(record, bytes) and record:
                        put(key, record)

    def put(self, batch: WriteBatch) -> Written:
        """Delete all records of an identity, renew the time to live of used records, and write new records."""
        if batch.forgotten is not None:
            self._delete(name_of(batch.forgotten) + b"*")
        stored_keys = set(self.find(list(batch.records))) if batch.records else set()
        with self._client.pipeline(transaction=False) as pipe:
            for key in (*batch.touched, *stored_keys) if self._ttl is not None else ():
                pipe.pexpire(name_of(key), self._ttl)
            for key, record in batch.records.items():
                if key not in stored_keys:
                    pipe.set(name_of(key), bytes(record), px=self._ttl)
            try:
                pipe.execute()
            except self._errors.ResponseError as error:
                if "OOM" in str(error):
                    raise StoreOutOfMemory(str(error)) from error
                raise
        return Written(len(batch.records) - len(stored_keys))

    def _delete(self, pattern: bytes) -> None:
        """Delete all records whose names match a pattern."""
        cursor = 0
        while True:
            cursor, names = self._client.scan(cursor, match=pattern, count=MOST_KEYS)
            if names:
                self._client.unlink(*names)
            if cursor == 0:
                return

    def interrupt(self) -> None:
        """Fail the call in progress; called by another thread."""
        connection = self._client.connection
        if connection is not None:
            connection.disconnect()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


class RemoteStore:
    """Blocks in a remote store, by their digests.

    Only the engine's thread calls the methods.

    Args:
        settings: address and limits.
        identity: see `PrefixStore`.
        block_bytes: bytes of the largest block.

    Attributes:
        pool: threads that ask the store.
        queue: changes that are still to be made.

    Raises:
        ConfigError: the client library is not installed, the address is malformed, or the store refuses the user or the
            password. A store that cannot be reached is no error: it may be reachable later.
    """

    def __init__(self, settings: RemoteSettings, identity: bytes, block_bytes: int) -> None:
        assert len(identity) == IDENTITY_BYTES
        import_redis()
        self._identity, self._timeout_s = identity, settings.timeout_s
        self._connect = partial(RedisConnection, settings, record_bytes(block_bytes))
        self._connection: RedisConnection | None = None
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
        self._counters = SourceCounters()
        self._has_failed = False
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self.queue = WriteQueue(
            "remote-cache-writer", self._write, identity, self._counters, batch_bytes=BATCH_BYTES, period_s=PERIOD_S
        )
        self.pool = SourcePool(
            "remote-cache",
            self._connect,
            settings.timeout_s,
            NUM_READERS,
            self._counters,
            breaker=self._breaker,
            may_ask=lambda: not self.queue.is_hidden,
            learn=self._learn,
        )

    # ---- the engine's thread ----

    def _learn(self, inquiry: Inquiry) -> None:
        """Forget the blocks that the store lacks according to an answer, and mark the blocks that it sent as used."""
        with self.queue.changed:
            for key in inquiry.keys:
                if key not in inquiry.records and inquiry.error is None and not inquiry.is_abandoned:
                    self._known.pop(key, None)
            if inquiry.with_records:
                self.queue.touch(key for key in inquiry.keys if key in inquiry.records)

    def holds(self, block: StoredBlock) -> bool:
        """Return whether a block is known to be in the store, or queued for writing."""
        key = record_key(self._identity, block)
        return key in self._known or key in self.queue

    def save(self, block: StoredBlock, payload: memoryview, *, wait: bool = False) -> None:
        """Queue a block for writing; it is dropped if the queue stays full, or the circuit is open."""
        with self.queue.changed:
            if self.queue.is_closing or self.holds(block):
                return
            if self._breaker.is_open:
                self.queue.drop()
            else:
                self.queue.put(record_key(self._identity, block), block, payload, ROOM_S if wait else 0.0)

    def reset(self) -> None:
        """Hide all records of this model; the writer then deletes them, for all engines."""
        with self.queue.changed:
            self._known.clear()
            self.queue.reset()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued writes and deletions are done, or dropped; return False on a timeout."""
        return self.queue.flush(timeout_s)

    def close(self) -> None:
        """Complete the queued writes, as far as `CLOSE_S` allows; further calls do nothing."""
        if self.queue.close(CLOSE_S, 2 * self._timeout_s):
            self.pool.close()
            self._disconnect()

    @property
    def stats(self) -> RemoteStats:
        """Counters since the start."""
        return self._counters.shown_as(RemoteStats, is_open=int(self._breaker.is_open))

    # ---- the writer's thread ----

    def _write(self, batch: WriteBatch) -> None:
        queue = self.queue
        if not self._breaker.allows():
            self._drop(batch)
            # Without a pause, the thread would retry a pending deletion in a busy loop.
            queue.pause(RETRY_S)
            return
        try:
            self._connection = self._connection or self._connect()
            written = self._connection.put(batch)
        # The client library raises errors of any kind if the answer violates the protocol.
        except Exception as error:
            if not self._has_failed:
                logger.warning("the remote prefix cache has failed, the engine goes on without: %s", error)
            self._has_failed = True
            self._counters.num_failures += 1
            self._breaker.failed()
            self._disconnect()
            self._drop(batch)
            return
        self._breaker.succeeded()
        self._counters.num_saved += written.num_added
        with queue.changed:
            if batch.forgotten is not None:
                queue.forgot(batch.num_resets)
            if queue.is_current(batch):
                self._known.update(dict.fromkeys(batch.records))
            while len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)

    def _drop(self, batch: WriteBatch) -> None:
        """Count the records of a failed batch; once the queue is closed, a deletion that fails is given up."""
        with self.queue.changed:
            self._counters.num_dropped += len(batch.records)
            if self.queue.is_closing:
                self.queue.forgot()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def name_of(key: bytes) -> bytes:
    """Return the name of a record in the store; for an identity, the prefix of its records' names."""
    return NAME_PREFIX + key[:IDENTITY_BYTES].hex().encode() + b":" + key[IDENTITY_BYTES:].hex().encode()


def import_redis() -> Any:
    """Return the client library."""
    with importing_extra("prefix_cache_url"):
        return import_module("redis")
