"""Durable prefix caches for tests: blocks with known bytes, in a folder."""

from __future__ import annotations

from pathlib import Path

from quire.distributed.kvstore.folder import StoreFolder
from quire.distributed.kvstore.prefix_store import PrefixStore
from quire.errors import ConfigError
from quire.memory.results import StoredBlock

PAYLOAD_BYTES = 20_000
MAX_BYTES = 2 << 20


def make_block(number: int, group_idx: int = 0) -> StoredBlock:
    """Return the identity of a block, all different."""
    return StoredBlock(
        group_idx, number.to_bytes(16, "little"), number.to_bytes(64, "big"), (number + 1000).to_bytes(16, "little")
    )


def payload_of(number: int) -> memoryview:
    """Return a block's bytes: those of no other block."""
    return memoryview((number.to_bytes(4, "big") * PAYLOAD_BYTES)[:PAYLOAD_BYTES])


def open_store(folder: Path, identity: bytes = b"a" * 16, max_bytes: int = MAX_BYTES) -> PrefixStore:
    """Open the store in a folder."""
    opened = StoreFolder(folder)
    try:
        return PrefixStore(opened, identity, max_bytes, PAYLOAD_BYTES)
    except ConfigError:
        opened.close()
        raise


def fill(folder: Path, count: int) -> None:
    """Save the first blocks, and close the store."""
    store = open_store(folder)
    for number in range(count):
        store.save(make_block(number), payload_of(number), wait=True)
    store.close()


def fetch(store: PrefixStore, number: int) -> bytes | None:
    """Return a block's bytes as the store has them, None where it does not have them."""
    out = bytearray(PAYLOAD_BYTES)
    return bytes(out) if store.fetch(make_block(number), memoryview(out)) else None


def found(store: PrefixStore, count: int) -> list[int]:
    """Return which of the first blocks are found; what is found must be right."""
    numbers = []
    for number in range(count):
        data = fetch(store, number)
        assert data is None or data == payload_of(number)
        if data is not None:
            numbers.append(number)
    return numbers
