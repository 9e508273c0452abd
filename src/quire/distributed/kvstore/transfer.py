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
identity, which is compared once. All lengths are bounded. Nothing is encrypted. The server has a listener thread and a
thread per connection. The client has a thread for each engine that requests name, up to `MOST_PEERS`.
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
# Limits of a server: connections, and the longest silence of a client, or time to send one record.
MOST_CONNECTIONS = 32
IDLE_S = 30.0
# Limits of a client: engines with a thread each, and the age of an unused connection, which the peer may have closed
# since.
MOST_PEERS = 8
FRESH_S = 5.0


class TransferError(Exception):
    """The peer does not speak the protocol, serves another model, or does not know the token."""


def receive_greeting(connection: socket.socket) -> tuple[bytes, bytes]:
    """Return the identity and the nonce of the first message of the other side."""
    data = receive(connection, GREETING.size)
    magic, version, identity, nonce = GREETING.unpack(data)
    if (magic, version) != (MAGIC, VERSION):
        raise TransferError(f"the peer speaks another protocol: {bytes(data[:6])!r}")
    return identity, nonce


def proof(token: str | None, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return the proof that a side knows the token."""
    key = blake2b((token or "").encode(), digest_size=32).digest()
    return blake2b(role + client_nonce + server_nonce, key=key, digest_size=PROOF_BYTES).digest()


def receive(connection: socket.socket, num_bytes: int) -> bytearray:
    """Receive exactly `num_bytes` bytes."""
    data = bytearray(num_bytes)
    view, start = memoryview(data), 0
    while start < num_bytes:
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
            answer = receive(self._socket, len(part))
            stored_keys += (key for key, is_there in zip(part, answer, strict=True) if is_there == 1)
        self._used_s = monotonic()
        return stored_keys

    def fetch(self, keys: Sequence[bytes], put: Callable[[bytes, Record], None]) -> None:
        """Pass the records that the peer has to `put`."""
        for start in range(0, len(keys), MOST_KEYS):
            part = keys[start : start + MOST_KEYS]
            self._send(READ, part)
            for key in part:
                (length,) = LENGTH.unpack(receive(self._socket, LENGTH.size))
                if length > self._max_bytes:
                    raise TransferError(f"a record has {length} bytes, more than {self._max_bytes}")
                if length:
                    put(key, bytes(receive(self._socket, length)))
        self._used_s = monotonic()

    def interrupt(self) -> None:
        """Fail the call in progress; called by another thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _send(self, operation: int, keys: Sequence[bytes]) -> None:
        if monotonic() - self._used_s > FRESH_S:
            self._socket.close()
            self._socket = self._connect()
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
        identity, server_nonce = receive_greeting(connection)
        peer_proof = receive(connection, PROOF_BYTES)
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
        num_turned_away: number of connections that were refused.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, config: KVTransferConfig, identity: bytes, exports: ExportTable) -> None:
        self._token = config.token
        self._identity = identity
        self._exports = exports
        self._path = config.kv_ip[len(UNIX) :] if config.kv_ip.startswith(UNIX) else None
        self.num_sent = self.sent_bytes = self.num_turned_away = 0
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
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="kv-transfer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end all connections; further calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
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
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # also if a client disconnected before it was accepted
                continue
            with self._lock:
                is_full = len(self._connections) >= MOST_CONNECTIONS
                if not is_full:
                    self._connections.add(connection)
            if is_full:
                self.num_turned_away += 1
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="kv-transfer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(IDLE_S)
            self._greet(connection)
            while not self._is_closed:
                self._answer(connection)
        except TransferError as error:
            self.num_turned_away += 1
            logger.warning("a client of the hand-over of blocks was turned away: %s", error)
        except OSError:
            pass
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _greet(self, connection: socket.socket) -> None:
        identity, client_nonce = receive_greeting(connection)
        nonce = secrets.token_bytes(NONCE_BYTES)
        mine = proof(self._token, b"server", client_nonce, nonce)
        connection.sendall(GREETING.pack(MAGIC, VERSION, self._identity, nonce) + mine)
        peer_proof = receive(connection, PROOF_BYTES)
        if not hmac.compare_digest(peer_proof, proof(self._token, b"client", client_nonce, nonce)):
            raise TransferError("it does not know the token")
        if identity != self._identity:
            raise TransferError("it serves another model, or the same in another layout")

    def _answer(self, connection: socket.socket) -> None:
        operation, count = REQUEST.unpack(receive(connection, REQUEST.size))
        if operation not in (WHICH, READ) or not 0 < count <= MOST_KEYS:
            raise TransferError(f"it asks for operation {operation} on {count} keys")
        data = bytes(receive(connection, count * KEY_BYTES))
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
            self.num_sent += 1
            self.sent_bytes += len(record)
