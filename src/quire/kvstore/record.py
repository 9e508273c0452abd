"""How a block lies on disk: what it is, its bytes, and a checksum over all of that and the key it lies under.

```
 | magic, version, group, lengths, parent | tokens | payload | crc32 |
```

The checksum is CRC-32: it finds every flipped byte and every burst of up to 32 bits, and all but one in four thousand
million of larger damages, at four times the speed of blake2b; a slower one would make loading lose to computing. Who
could write here on purpose could also read the key.
"""

from __future__ import annotations

from struct import Struct
from zlib import crc32

from quire.memory.results import StoredBlock

MAGIC = b"QKVB"
VERSION = 1
IDENTITY_BYTES = 16
_HEADER = Struct("<4sHHIQ16s")
_GROUP = Struct("<H")
_CHECKSUM = Struct("<I")


def record_key(identity: bytes, block: StoredBlock) -> bytes:
    """Return what a block's record is found under.

    Args:
        identity: of the model and of all that its KV depends on, `IDENTITY_BYTES` bytes.
        block: the block.
    """
    return identity + _GROUP.pack(block.group_idx) + block.digest


def pack(block: StoredBlock, payload: memoryview) -> bytearray:
    """Return a block's record, its checksum not yet computed; the payload is copied once.

    Args:
        block: the block.
        payload: its bytes.
    """
    header = _HEADER.pack(MAGIC, VERSION, block.group_idx, len(block.tokens), len(payload), block.parent)
    start = len(header) + len(block.tokens)
    record = bytearray(start + len(payload) + _CHECKSUM.size)
    record[:start] = header + block.tokens
    record[start : -_CHECKSUM.size] = payload
    return record


def seal(key: bytes, record: bytearray) -> None:
    """Compute a record's checksum.

    Args:
        key: what the record will be found under.
        record: as `pack` returned it.
    """
    body = memoryview(record)[: -_CHECKSUM.size]
    _CHECKSUM.pack_into(record, len(body), crc32(body, crc32(key)))


def unpack(key: bytes, block: StoredBlock, record: memoryview, out: memoryview) -> bool:
    """Copy a record's payload out, and say whether it is whole and is the block that is wanted.

    Args:
        key: what the record was found under.
        block: what it must be; the tokens, with their media, and the parent are compared, not only the digest.
        record: as it was read.
        out: where the payload goes; worthless when the answer is False.
    """
    start = _HEADER.size + len(block.tokens)
    if len(record) != start + len(out) + _CHECKSUM.size:
        return False
    header = _HEADER.pack(MAGIC, VERSION, block.group_idx, len(block.tokens), len(out), block.parent)
    if record[: len(header)] != header or record[len(header) : start] != block.tokens:
        return False
    out[:] = record[start : -_CHECKSUM.size]
    # What was copied is what is checked: the file may change under the mapping.
    checksum = crc32(out, crc32(record[:start], crc32(key)))
    return record[-_CHECKSUM.size :] == _CHECKSUM.pack(checksum)
