"""A connection to a store that speaks the protocol of Redis: Redis, Valkey, and others.

The client library is imported here only, once a store is configured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from quire.config.extras import importing_extra
from quire.config.store_url import bad_url, client_url

# Greatest numbers of keys, and of record bytes, of one round trip.
MOST_KEYS = 1024
ROUND_BYTES = 4 << 20


class RefusedAuth(Exception):
    """The store refuses the user, or the password, of the address."""


class StoreOutOfMemory(Exception):
    """The store has no room for a record, and does not evict others."""


class RedisConnection:
    """A connection; one thread uses it at a time."""

    def __init__(self, url: str, timeout_s: float, record_bytes: int, name_of: Callable[[bytes], bytes]) -> None:
        redis = import_redis()
        self._errors: Any = import_module("redis.exceptions")
        self._record_bytes = record_bytes
        self._name_of = name_of
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

    def which(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys that the store has."""
        found: list[bytes] = []
        for start in range(0, len(keys), MOST_KEYS):
            part = keys[start : start + MOST_KEYS]
            with self._client.pipeline(transaction=False) as pipe:
                for key in part:
                    pipe.exists(self._name_of(key))
                found += (key for key, is_there in zip(part, pipe.execute(), strict=True) if is_there == 1)
        return found

    def read(self, keys: Sequence[bytes], put: Callable[[bytes, bytes], None]) -> None:
        """Pass the records that the store has to `put`, in rounds: the first arrive before the last are requested."""
        for start in range(0, len(keys), self._round_keys):
            part = keys[start : start + self._round_keys]
            with self._client.pipeline(transaction=False) as pipe:
                for key in part:
                    # A range, so that a foreign value takes no more memory than a record.
                    pipe.getrange(self._name_of(key), 0, self._record_bytes)
                for key, record in zip(part, pipe.execute(), strict=True):
                    if isinstance(record, bytes) and record:
                        put(key, record)

    def write(self, records: Mapping[bytes, bytearray], ttl_s: float | None) -> int:
        """Write records that the store does not have, and renew the time to live of the others."""
        known = set(self.which(list(records)))
        with self._client.pipeline(transaction=False) as pipe:
            for key, record in records.items():
                if key not in known:
                    pipe.set(self._name_of(key), bytes(record), px=_milliseconds(ttl_s))
                elif ttl_s is not None:
                    pipe.pexpire(self._name_of(key), _milliseconds(ttl_s))
            try:
                pipe.execute()
            except self._errors.ResponseError as error:
                if "OOM" in str(error):
                    raise StoreOutOfMemory(str(error)) from error
                raise
        return len(records) - len(known)

    def prolong(self, keys: Sequence[bytes], ttl_s: float) -> None:
        """Renew the time to live of records."""
        with self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.pexpire(self._name_of(key), _milliseconds(ttl_s))
            pipe.execute()

    def delete(self, pattern: bytes) -> None:
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


def import_redis() -> Any:
    """Return the client library."""
    with importing_extra("prefix_cache_url"):
        return import_module("redis")


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else max(1, int(seconds * 1000))
