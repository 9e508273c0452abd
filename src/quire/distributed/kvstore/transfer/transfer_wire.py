"""The protocol of the hand-over of blocks between engines, over TCP or a Unix socket.

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
identity, which is compared once. All lengths are bounded. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple

from quire.distributed.kvstore.record import IDENTITY_BYTES

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


class TransferError(Exception):
    """A peer that does not speak the protocol, serves another model, or does not know the token."""


class Greeting(NamedTuple):
    """The first message of either side.

    Args:
        identity: fingerprint of the engine's model and layout.
        nonce: random bytes.
    """

    identity: bytes
    nonce: bytes

    def pack(self) -> bytes:
        """Return the message."""
        return GREETING.pack(MAGIC, VERSION, self.identity, self.nonce)

    @classmethod
    def unpack(cls, data: bytes) -> Greeting:
        """Return the greeting of an encoded message."""
        magic, version, identity, nonce = GREETING.unpack(data)
        if (magic, version) != (MAGIC, VERSION):
            raise TransferError(f"the peer speaks another protocol: {data[:6]!r}")
        return cls(identity, nonce)


def proof(token: str | None, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return the proof that a side knows the token."""
    key = blake2b((token or "").encode(), digest_size=32).digest()
    return blake2b(role + client_nonce + server_nonce, key=key, digest_size=PROOF_BYTES).digest()


def is_proof(given: bytes, expected: bytes) -> bool:
    """Return whether a proof is the expected one, in constant time."""
    return hmac.compare_digest(given, expected)


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


def pack_request(operation: int, keys: Sequence[bytes]) -> bytes:
    """Return a request."""
    return REQUEST.pack(operation, len(keys)) + b"".join(keys)


def split_keys(data: bytes | bytearray) -> list[bytes]:
    """Return the keys of a request's body."""
    return [bytes(data[start : start + KEY_BYTES]) for start in range(0, len(data), KEY_BYTES)]
