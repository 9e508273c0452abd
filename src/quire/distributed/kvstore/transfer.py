"""The hand-over of blocks between engines, over TCP or a Unix socket: its protocol, and both of its ends.

```
 client                                        server
 magic, version, identity, nonce      -->
                                      <--      magic, version, identity, nonce, proof of the server
 proof of the client                  -->
 operation, count, count keys         -->
                                      <--      "which": a byte for each key
                                      <--      "read": for each key the length of its record, 0 for none, and the record
```

A proof is a keyed digest of both nonces: it shows that a side knows the token. Keys are record keys without the
identity, which is compared once. All lengths are bounded, and so is the time of every message, however slowly its bytes
come. Nothing is encrypted. The server has a listener thread and a thread per connection; when all connections are in
use, a new one takes the place of the one that has made no progress for the longest time. The client has a thread for
each engine that requests name, up to `MOST_PEERS`.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from struct import Struct
from time import monotonic
from typing import NamedTuple

from quire.config.kv_transfer import UNIX, KVTransferConfig
from quire.distributed.kvstore.counters import SourceCounters
from quire.distributed.kvstore.exports import ExportTable
from quire.distributed.kvstore.record import IDENTITY_BYTES, record_bytes
from quire.distributed.kvstore.sources import Record, SourcePool
from quire.errors import ConfigError

logger = logging.getLogger(__name__)

MAGIC = b"QKVT"
VERSION = 1
NONCE_BYTES = 16
PROOF_BYTES = 32
GREETING = Struct(f"<4sH{IDENTITY_BYTES}s{NONCE_BYTES}s")
REQUEST = Struct("<BI")
LENGTH = Struct("<I")
WHICH, READ = 1, 2
MOST_KEYS = 1 << 16
KEY_BYTES = 18
# Limits of a server: connections; the wait for a client's next request, and the time of a message in either direction.
MOST_CONNECTIONS = 32
IDLE_S = 30.0
MESSAGE_S = 10.0
# Wait before the next connection is accepted, after none could be.
RETRY_S = 0.1
ERROR_LOG_INTERVAL_S = 60.0
# Limits of a client: engines with a thread each, and the age of an unused connection, after which the client makes a
# new one, since the server may have closed it.
MOST_PEERS = 8
FRESH_S = 5.0


class TransferError(Exception):
    """The peer does not speak the protocol, serves another model, or does not know the token."""


def receive_greeting(connection: socket.socket, timeout_s: float) -> tuple[bytes, bytes]:
    """Return the identity and the nonce of the first message of the other side."""
    data = receive(connection, GREETING.size, timeout_s)
    magic, version, identity, nonce = GREETING.unpack(data)
    if (magic, version) != (MAGIC, VERSION):
        raise TransferError(f"the peer speaks another protocol: {bytes(data[:6])!r}")
    return identity, nonce


def proof(token: str | None, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return the proof that a side knows the token."""
    key = blake2b((token or "").encode(), digest_size=32).digest()
    return blake2b(role + client_nonce + server_nonce, key=key, digest_size=PROOF_BYTES).digest()


def receive(connection: socket.socket, num_bytes: int, timeout_s: float) -> bytearray:
    """Receive exactly `num_bytes` bytes within `timeout_s` in all, else raise `TimeoutError`."""
    data = bytearray(num_bytes)
    view, start, deadline_s = memoryview(data), 0, monotonic() + timeout_s
    while start < num_bytes:
        left_s = deadline_s - monotonic()
        if left_s <= 0:
            raise TimeoutError(f"{start} of {num_bytes} bytes have arrived within {timeout_s:g} s")
        connection.settimeout(left_s)
        count = connection.recv_into(view[start:])
        if not count:
            raise ConnectionResetError("the peer ended the connection")
        start += count
    return data


# ---- the engine that fetches ----


class PeerAddress(NamedTuple):
    """The address of an engine that exports blocks.

    Args:
        host: name or address, or "unix:PATH".
        port: port; 0 with a path.
    """

    host: str
    port: int


class PeerConnection:
    """A connection to an engine that exports blocks."""

    def __init__(
        self, address: PeerAddress, identity: bytes, token: str | None, timeout_s: float, max_bytes: int
    ) -> None:
        self._address = address
        self._identity = identity
        self._token = token
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._socket = self._connect()
        self._used_s = monotonic()

    def find(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys that the peer has."""
        stored_keys: list[bytes] = []
        for start in range(0, len(keys), MOST_KEYS):
            part = keys[start : start + MOST_KEYS]
            self._send(WHICH, part)
            answer = self._receive(len(part))
            stored_keys += (key for key, is_there in zip(part, answer, strict=True) if is_there == 1)
        self._used_s = monotonic()
        return stored_keys

    def fetch(self, keys: Sequence[bytes], put: Callable[[bytes, Record], None]) -> None:
        """Pass the records that the peer has to `put`."""
        for start in range(0, len(keys), MOST_KEYS):
            part = keys[start : start + MOST_KEYS]
            self._send(READ, part)
            for key in part:
                (length,) = LENGTH.unpack(self._receive(LENGTH.size))
                if length > self._max_bytes:
                    raise TransferError(f"a record has {length} bytes, more than {self._max_bytes}")
                if length:
                    put(key, bytes(self._receive(length)))
        self._used_s = monotonic()

    def interrupt(self) -> None:
        """Fail the call in progress; called by another thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _receive(self, num_bytes: int) -> bytearray:
        return receive(self._socket, num_bytes, self._timeout_s)

    def _send(self, operation: int, keys: Sequence[bytes]) -> None:
        if monotonic() - self._used_s > FRESH_S:
            self._socket.close()
            self._socket = self._connect()
        self._socket.settimeout(self._timeout_s)
        self._socket.sendall(REQUEST.pack(operation, len(keys)) + b"".join(key[IDENTITY_BYTES:] for key in keys))

    def _connect(self) -> socket.socket:
        host, port = self._address
        if host.startswith(UNIX):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(self._timeout_s)
        else:
            connection = socket.create_connection((host, port), self._timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            if host.startswith(UNIX):
                connection.connect(host[len(UNIX) :])
            self._greet(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _greet(self, connection: socket.socket) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(GREETING.pack(MAGIC, VERSION, self._identity, nonce))
        identity, server_nonce = receive_greeting(connection, self._timeout_s)
        peer_proof = receive(connection, PROOF_BYTES, self._timeout_s)
        if not hmac.compare_digest(peer_proof, proof(self._token, b"server", nonce, server_nonce)):
            raise TransferError("the peer does not know the token")
        connection.sendall(proof(self._token, b"client", nonce, server_nonce))
        if identity != self._identity:
            raise TransferError("the peer serves another model, or the same in another layout")


class Peers:
    """The engines that requests have named, as sources of blocks."""

    def __init__(self, identity: bytes, token: str | None, timeout_s: float, block_bytes: int) -> None:
        self._connection = partial(
            PeerConnection, identity=identity, token=token, timeout_s=timeout_s, max_bytes=record_bytes(block_bytes)
        )
        self._timeout_s = timeout_s
        self._pools: OrderedDict[PeerAddress, SourcePool] = OrderedDict()
        self.counters = SourceCounters()

    def source_of(self, address: PeerAddress) -> SourcePool:
        """Return the source of an address; beyond `MOST_PEERS`, the least recently used source is closed."""
        pool = self._pools.pop(address, None)
        if pool is None:
            pool = SourcePool("kv-peer", partial(self._connection, address), self._timeout_s, 1, self.counters)
        self._pools[address] = pool
        if len(self._pools) > MOST_PEERS:
            self._pools.popitem(last=False)[1].close(wait=False)
        return pool

    def close(self) -> None:
        """End all threads."""
        for pool in self._pools.values():
            pool.close()


# ---- the engine that exports ----


class TransferServer:
    """Serves the records of an export table.

    Args:
        config: address and token.
        identity: fingerprint of the engine's model and layout; other engines are turned away.
        exports: the records.

    Attributes:
        host, port: address that clients connect to.
        num_sent, sent_bytes: numbers of records and bytes that were sent.
        num_turned_away: number of connections that were refused, or gave their place to a new one.
        num_starved: number of connections that could not be accepted, for lack of descriptors or threads.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, config: KVTransferConfig, identity: bytes, exports: ExportTable) -> None:
        self._token = config.token
        self._identity = identity
        self._exports = exports
        self._path = config.kv_ip[len(UNIX) :] if config.kv_ip.startswith(UNIX) else None
        self.num_sent = self.sent_bytes = self.num_turned_away = self.num_starved = 0
        try:
            self._listener = self._listen(config)
        except OSError as error:
            raise ConfigError(
                f"kv_transfer_config: {config.kv_ip}:{config.kv_port} cannot be listened at: {error.strerror or error}",
                field="kv_transfer_config",
            ) from error
        self.host = config.kv_ip
        self.port: int = 0 if self._path is not None else self._listener.getsockname()[1]
        self._lock = threading.Lock()
        # Connections, each with the time of its last progress: a message that was received or sent whole.
        self._connections: dict[socket.socket, float] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="kv-transfer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end all connections; further calls do nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        with self._lock:
            connections = [self._listener, *self._connections]
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5.0)
        if self._path is not None:
            Path(self._path).unlink(missing_ok=True)

    def _listen(self, config: KVTransferConfig) -> socket.socket:
        if self._path is None:
            family = socket.AF_INET6 if ":" in config.kv_ip else socket.AF_INET
            return socket.create_server((config.kv_ip, config.kv_port), family=family, backlog=MOST_CONNECTIONS)
        path = Path(self._path)
        if path.is_socket():  # left by an engine that was killed
            path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listener.bind(self._path)
        except OSError:
            listener.close()
            raise
        finally:
            os.umask(before)
        listener.listen(MOST_CONNECTIONS)
        return listener

    def _accept(self) -> None:
        logged_s = -ERROR_LOG_INTERVAL_S
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if self._closed.is_set():
                    return
                self.num_starved += 1
                if monotonic() - logged_s > ERROR_LOG_INTERVAL_S:
                    logged_s = monotonic()
                    logger.error("the hand-over of blocks can take no connection: %s", error.strerror or error)
                self._closed.wait(RETRY_S)
                continue
            if not self._take(connection):
                self.num_turned_away += 1
                connection.close()

    def _take(self, connection: socket.socket) -> bool:
        """Serve a connection, in a thread, if there is room; make room by ending a connection without progress."""
        with self._lock:
            now_s = monotonic()
            if len(self._connections) >= MOST_CONNECTIONS:
                slowest, since_s = min(self._connections.items(), key=lambda item: item[1])
                if now_s - since_s < FRESH_S:
                    return False
                self.num_turned_away += 1
                del self._connections[slowest]
                with suppress(OSError):
                    slowest.shutdown(socket.SHUT_RDWR)
            self._connections[connection] = now_s
        try:
            threading.Thread(target=self._serve, args=(connection,), name="kv-transfer", daemon=True).start()
        except RuntimeError:  # the system starts no more threads
            self.num_starved += 1
            with self._lock:
                self._connections.pop(connection, None)
            return False
        return True

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._greet(connection)
            while not self._closed.is_set():
                self._progress(connection)
                self._answer(connection)
        except TransferError as error:
            self.num_turned_away += 1
            logger.warning("a client of the hand-over of blocks was turned away: %s", error)
        except OSError:
            pass
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    def _progress(self, connection: socket.socket) -> None:
        with self._lock:
            if connection in self._connections:  # else it has given its place to another one
                self._connections[connection] = monotonic()

    def _greet(self, connection: socket.socket) -> None:
        try:
            identity, client_nonce = receive_greeting(connection, FRESH_S)
        except TimeoutError as error:
            raise TransferError(f"its greeting is not complete: {error}") from error
        nonce = secrets.token_bytes(NONCE_BYTES)
        mine = proof(self._token, b"server", client_nonce, nonce)
        connection.sendall(GREETING.pack(MAGIC, VERSION, self._identity, nonce) + mine)
        peer_proof = receive(connection, PROOF_BYTES, FRESH_S)
        if not hmac.compare_digest(peer_proof, proof(self._token, b"client", client_nonce, nonce)):
            raise TransferError("it does not know the token")
        if identity != self._identity:
            raise TransferError("it serves another model, or the same in another layout")

    def _answer(self, connection: socket.socket) -> None:
        operation, count = REQUEST.unpack(receive(connection, REQUEST.size, IDLE_S))
        if operation not in (WHICH, READ) or not 0 < count <= MOST_KEYS:
            raise TransferError(f"it asks for operation {operation} on {count} keys")
        data = bytes(receive(connection, count * KEY_BYTES, MESSAGE_S))
        self._progress(connection)
        connection.settimeout(MESSAGE_S)  # of each `sendall` in all, however slowly the client reads
        keys = [data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES)]
        if operation == WHICH:
            connection.sendall(bytes(self._identity + key in self._exports for key in keys))
            return
        for key in keys:
            record = self._exports.get(self._identity + key)
            if record is None:
                connection.sendall(LENGTH.pack(0))
                continue
            connection.sendall(LENGTH.pack(len(record)) + record)
            self._progress(connection)
            self.num_sent += 1
            self.sent_bytes += len(record)
