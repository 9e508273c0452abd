"""The header of a safetensors file, as far as it is checked before the library parses it."""

from __future__ import annotations

from typing import BinaryIO, Final

# Largest header that the library takes.
MAX_HEADER_BYTES: Final = 100_000_000
# Most tensors of one file. The library takes some 9 us and 700 bytes for each, also for those without values; of the
# models that run, the one with the most has 144,000, in 25 files.
MAX_TENSORS: Final = 1 << 17
_LENGTH_BYTES: Final = 8


def read_header_text(stream: BinaryIO) -> bytes:
    """Read the JSON text of a header from the beginning of a file.

    Raises:
        ValueError: the file declares a longer header than the library takes.
    """
    length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header must have at most {MAX_HEADER_BYTES:,} bytes, got {length:,}")
    return stream.read(length)


def header_of(content: bytes) -> bytes:
    """Return the JSON text of the header of a whole file."""
    return content[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")]


def check_num_tensors(header: bytes, limit: int = MAX_TENSORS) -> None:
    """Refuse a header with too many tensors, without parsing it.

    Raises:
        ValueError: it may have more than `limit` tensors.
    """
    # A tensor has at least two lists: its shape, and its offsets.
    count = header.count(b"[") // 2
    if count > limit:
        raise ValueError(f"it must have at most {limit:,} tensors, got {count:,}")
