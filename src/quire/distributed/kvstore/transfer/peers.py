"""Other engines that export blocks: a pool of one thread for each, for the most recently used few."""

from __future__ import annotations

import secrets
import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

from quire.config.kv_transfer import UNIX
from quire.distributed.kvstore.circuit_breaker import CircuitBreaker
from quire.distributed.kvstore.record import IDENTITY_BYTES, record_bytes, record_key
from quire.distributed.kvstore.source_pool import Inquiry, SourcePool
from quire.distributed.kvstore.transfer.transfer_wire import (
    GREETING,
    LENGTH,
    MOST_KEYS,
    NONCE_BYTES,
    PROOF_BYTES,
    READ,
    WHICH,
    Greeting,
    TransferError,
    is_proof,
    pack_request,
    proof,
    receive,
)
from quire.memory.results import StoredBlock

MOST_PEERS = 8
# A connection that was unused for longer is made anew: the peer may have closed it.
FRESH_S = 5.0
COUNTERS = (
    "num_hits",
    "num_misses",
    "loaded_bytes",
    "load_s",
    "num_late",
    "num_refused",
    "num_failures",
    "num_damaged",
)


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

    def which(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys that the peer has."""
        found: list[bytes] = []
        for start in range(0, len(keys), MOST_KEYS):
            part = keys[start : start + MOST_KEYS]
            self._send(WHICH, part)
            answer = receive(self._socket, len(part))
            found += (key for key, is_there in zip(part, answer, strict=True) if is_there == 1)
        self._used_s = monotonic()
        return found

    def read(self, keys: Sequence[bytes], put: Callable[[bytes, bytes], None]) -> None:
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
        self._socket.sendall(pack_request(operation, [key[IDENTITY_BYTES:] for key in keys]))

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
        connection.sendall(Greeting(self._identity, nonce).pack())
        server = Greeting.unpack(bytes(receive(connection, GREETING.size)))
        given = bytes(receive(connection, PROOF_BYTES))
        if not is_proof(given, proof(self._token, b"server", nonce, server.nonce)):
            raise TransferError("the peer does not know the token")
        connection.sendall(proof(self._token, b"client", nonce, server.nonce))
        if server.identity != self._identity:
            raise TransferError("the peer serves another model, or the same in another layout")


class PeerSource:
    """An engine that exports blocks, as a source of blocks.

    Args:
        connect: function that connects to the engine.
        identity: fingerprint of this engine's model and layout.
        timeout_s: longest wait for an answer.

    Attributes:
        num_hits, num_misses, loaded_bytes, load_s, num_late, num_damaged: see `TransferStats`.
        num_refused: number of inquiries that were not sent.
    """

    def __init__(self, connect: Callable[[], PeerConnection], identity: bytes, timeout_s: float) -> None:
        self._identity = identity
        self._pool = SourcePool("kv-peer", connect, timeout_s, 1, CircuitBreaker())
        self.num_hits = self.num_misses = self.loaded_bytes = 0
        self.num_late = self.num_damaged = self.num_refused = 0
        self.load_s = 0.0

    def ask(self, blocks: Sequence[StoredBlock], *, with_records: bool) -> Inquiry | None:
        """Ask which of the blocks the peer has, or for their records; None where the inquiry cannot be queued now."""
        inquiry = Inquiry([record_key(self._identity, block) for block in blocks], with_records=with_records)
        if not self._pool.ask(inquiry):
            self.num_refused += 1
            return None
        return inquiry

    def abandon(self, inquiry: Inquiry) -> None:
        """Stop waiting for an answer."""
        self._pool.abandon(inquiry)

    def note(self, inquiry: Inquiry) -> None:
        """Do nothing: a peer's blocks expire, so an answer says nothing about later inquiries."""

    @property
    def num_failures(self) -> int:
        """Number of inquiries that failed."""
        return self._pool.num_failures

    def close(self, *, wait: bool = True) -> None:
        """End the thread; see `SourcePool.close`."""
        self._pool.close(wait=wait)


class Peers:
    """The engines that requests have named.

    Args:
        identity: fingerprint of this engine's model and layout.
        token: shared secret of both sides; None for the empty secret.
        timeout_s: longest wait for an answer.
        block_bytes: bytes of the largest block.
    """

    def __init__(self, identity: bytes, token: str | None, timeout_s: float, block_bytes: int) -> None:
        self._identity = identity
        self._token = token
        self._timeout_s = timeout_s
        self._max_bytes = record_bytes(block_bytes)
        self._sources: OrderedDict[PeerAddress, PeerSource] = OrderedDict()
        # Counters of sources that are no longer in use.
        self._past = dict.fromkeys(COUNTERS, 0.0)

    def source_of(self, address: PeerAddress) -> PeerSource:
        """Return the source of an address; beyond `MOST_PEERS`, the least recently used source is closed."""
        source = self._sources.pop(address, None)
        if source is None:

            def connect() -> PeerConnection:
                return PeerConnection(address, self._identity, self._token, self._timeout_s, self._max_bytes)

            source = PeerSource(connect, self._identity, self._timeout_s)
        self._sources[address] = source
        if len(self._sources) > MOST_PEERS:
            oldest = self._sources.popitem(last=False)[1]
            for name in COUNTERS:
                self._past[name] += getattr(oldest, name)
            oldest.close(wait=False)
        return source

    def total(self, name: str) -> float:
        """Return the sum of a counter over all sources."""
        return self._past[name] + float(sum(getattr(source, name) for source in self._sources.values()))

    def close(self) -> None:
        """End all threads."""
        for source in self._sources.values():
            source.close()
