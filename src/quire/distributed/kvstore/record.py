"""The record of a block on disk: its identity, its bytes, and a checksum over them and the record's key.

```
 | magic, version, group, lengths, parent | tokens | payload | crc32 |
```

The checksum is CRC-32: it detects every flipped byte, every burst of up to 32 bits, and all but one in 2^32 larger
errors, at four times the speed of blake2b; a slower one would make loading slower than computing. An attacker who can
write the record can also read the key, so a keyed digest would add nothing.
"""

from __future__ import annotations

from ctypes import c_ubyte
from struct import Struct
from typing import Protocol
from zlib import crc32

from torch import Tensor

from quire.memory.results import StoredBlock

MAGIC = b"QKVB"
VERSION = 1
IDENTITY_BYTES = 16
# Limit of a block's content: the tokens of a block of 1,024, and its media entries.
MOST_CONTENT_BYTES = 64 << 10
_HEADER = Struct("<4sHHIQ16s")
_GROUP = Struct("<H")
_CHECKSUM = Struct("<I")


class ArrivingBytes(Protocol):
    """An asynchronous copy of a block's bytes from a device to host memory."""

    @property
    def is_ready(self) -> bool:
        """True once the copy is complete."""

    def wait(self) -> Tensor:
        """Wait for the copy and return the bytes, uint8 [bytes of the block]; any thread may call it."""


def bytes_of(data: Tensor) -> memoryview:
    """Return a view of a contiguous tensor's memory, without a copy; valid as long as the tensor is."""
    return memoryview((c_ubyte * data.nbytes).from_address(data.data_ptr())).cast("B")


def record_key(identity: bytes, block: StoredBlock) -> bytes:
    """Return the key of a block's record.

    Args:
        identity: digest of the model and of everything else that determines its KV, `IDENTITY_BYTES` bytes.
        block: the block.
    """
    return identity + _GROUP.pack(block.group_idx) + block.digest


def record_bytes(block_bytes: int) -> int:
    """Return the greatest size of a record whose payload has `block_bytes` bytes."""
    return _HEADER.size + MOST_CONTENT_BYTES + block_bytes + _CHECKSUM.size


def size_of(block: StoredBlock, payload_bytes: int) -> int:
    """Return the size of a block's record with a payload of `payload_bytes` bytes."""
    return _HEADER.size + len(block.tokens) + payload_bytes + _CHECKSUM.size


def read_key(key: bytes) -> tuple[int, bytes]:
    """Return group and digest of the block that a record's key names."""
    return _GROUP.unpack_from(key, IDENTITY_BYTES)[0], key[IDENTITY_BYTES + _GROUP.size :]


def pack(block: StoredBlock, payload: memoryview) -> bytearray:
    """Return a block's record without its checksum; the payload is copied once."""
    header = _HEADER.pack(MAGIC, VERSION, block.group_idx, len(block.tokens), len(payload), block.parent)
    start = len(header) + len(block.tokens)
    record = bytearray(start + len(payload) + _CHECKSUM.size)
    record[:start] = header + block.tokens
    record[start : -_CHECKSUM.size] = payload
    return record


def seal(key: bytes, record: bytearray) -> None:
    """Compute a record's checksum."""
    body = memoryview(record)[: -_CHECKSUM.size]
    _CHECKSUM.pack_into(record, len(body), crc32(body, crc32(key)))


def unpack(key: bytes, block: StoredBlock, record: memoryview, out: memoryview) -> bool:
    """Copy a record's payload to `out`; return False if the record is damaged or of another block."""
    start = _HEADER.size + len(block.tokens)
    if len(record) != start + len(out) + _CHECKSUM.size:
        return False
    header = _HEADER.pack(MAGIC, VERSION, block.group_idx, len(block.tokens), len(out), block.parent)
    if record[: len(header)] != header or record[len(header) : start] != block.tokens:
        return False
    out[:] = record[start : -_CHECKSUM.size]
    # The copy is checked, not the source: the file may change under the mapping.
    checksum = crc32(out, crc32(record[:start], crc32(key)))
    return record[-_CHECKSUM.size :] == _CHECKSUM.pack(checksum)
