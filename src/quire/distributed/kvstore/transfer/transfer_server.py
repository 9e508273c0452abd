"""Sends exported blocks to other engines: a listener thread, and a thread per connection, with limits on all."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from contextlib import suppress
from pathlib import Path

from quire.config.kv_transfer import UNIX, KVTransferConfig
from quire.distributed.kvstore.exports import ExportTable
from quire.distributed.kvstore.transfer.transfer_wire import (
    GREETING,
    KEY_BYTES,
    LENGTH,
    MOST_KEYS,
    NONCE_BYTES,
    PROOF_BYTES,
    READ,
    REQUEST,
    WHICH,
    Greeting,
    TransferError,
    is_proof,
    proof,
    receive,
    split_keys,
)
from quire.errors import ConfigError

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 32
# Socket timeout: longest silence of a client, and longest time to send one record.
IDLE_S = 30.0


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
            _shut(connection)
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
        client = Greeting.unpack(bytes(receive(connection, GREETING.size)))
        nonce = secrets.token_bytes(NONCE_BYTES)
        mine = proof(self._token, b"server", client.nonce, nonce)
        connection.sendall(Greeting(self._identity, nonce).pack() + mine)
        given = receive(connection, PROOF_BYTES)
        if not is_proof(bytes(given), proof(self._token, b"client", client.nonce, nonce)):
            raise TransferError("it does not know the token")
        if client.identity != self._identity:
            raise TransferError("it serves another model, or the same in another layout")

    def _answer(self, connection: socket.socket) -> None:
        operation, count = REQUEST.unpack(receive(connection, REQUEST.size))
        if operation not in (WHICH, READ) or not 0 < count <= MOST_KEYS:
            raise TransferError(f"it asks for operation {operation} on {count} keys")
        keys = split_keys(receive(connection, count * KEY_BYTES))
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


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
