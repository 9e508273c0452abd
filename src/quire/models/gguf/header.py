"""The header of a GGUF file, read within limits: its fields, and its descriptions of tensors.

The file is not trusted: each count and length is compared with the number of remaining bytes before data are read or
memory is allocated, and the whole header has limits of bytes, values and tensors.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from quire.errors import CheckpointError, shown
from quire.platform.bounded.files import open_file, reason_of

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
# The vocabulary of Gemma 4 (262,144 tokens and 514,906 merges) takes 16 MB. UTF-8 takes at most four times its bytes in
# memory as a `str`, so the strings of a header take at most 128 MiB.
MAX_HEADER_BYTES: Final = 32 << 20
# Number of values in all arrays; a value may take 72 bytes in memory. The vocabulary above has 1.3 million.
MAX_VALUES: Final = 1 << 21
MAX_FIELDS: Final = 1 << 15
MAX_TENSORS: Final = 1 << 15
MAX_NAME_BYTES: Final = 1 << 16
# Much longer than the longest chat template. Decoding a string temporarily needs several times its bytes.
MAX_STRING_BYTES: Final = 4 << 20
MAX_DIMS: Final = 4
# Bytes of the shortest field and of the shortest description of a tensor.
MIN_FIELD_BYTES: Final = 8 + 1 + 4 + 1
MIN_TENSOR_BYTES: Final = 8 + 1 + 4 + 4 + 8
# Bytes that are read at a time.
CHUNK_BYTES: Final = 1 << 20

U32: Final = struct.Struct("<I")
U64: Final = struct.Struct("<Q")
# The types of values by number, in the codes of `struct`. Booleans are bytes, which are checked.
NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
BOOL: Final = 7
STRING: Final = 8
ARRAY: Final = 9


class TensorInfo(NamedTuple):
    """The description of a tensor in a header, not yet checked against the file.

    Args:
        name: name of the tensor.
        sizes: sizes of its dimensions, fastest first.
        type_id: number of its type.
        offset: offset of its first byte from the beginning of the data.
    """

    name: str
    sizes: tuple[int, ...]
    type_id: int
    offset: int


class Header(NamedTuple):
    """The header of one file.

    Args:
        fields: values by name.
        tensors: descriptions of the tensors, in the order of the file; their names are unique.
        num_bytes: number of bytes of the header.
        file_bytes: number of bytes of the file.
    """

    fields: Mapping[str, Any]
    tensors: tuple[TensorInfo, ...]
    num_bytes: int
    file_bytes: int


def read_header(path: Path, max_bytes: int = MAX_HEADER_BYTES) -> Header:
    """Read the header of a file.

    Args:
        path: the file.
        max_bytes: maximum number of bytes of the header.

    Raises:
        CheckpointError: it is not a GGUF file of a supported version, or is damaged; the message names the field.
    """
    try:
        with open_file(path) as stream:
            return _HeaderReader(path, stream, max_bytes).read()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:  # a name with a null character is a ValueError
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from error


class _HeaderReader:
    """The bytes of a header that were read, and the position in them."""

    def __init__(self, path: Path, stream: BinaryIO, max_bytes: int) -> None:
        self._path = path
        self._stream = stream
        self._file_bytes = os.fstat(stream.fileno()).st_size
        self._max_bytes = max_bytes
        self._limit = min(self._file_bytes, max_bytes)
        self._read = bytearray()
        self._position = 0
        self._num_values = 0

    def read(self) -> Header:
        """Return the header."""
        num_tensors, num_fields = self._start()
        fields: dict[str, Any] = {}
        for number in range(num_fields):
            name = self._name(f"the name of field {number}")
            if name in fields:
                raise self._error(f"field {shown(name)} is there twice")
            fields[name] = self._value(name, f"field {shown(name)}")
        infos: dict[str, TensorInfo] = {}
        for number in range(num_tensors):
            name = self._name(f"the name of tensor {number}")
            if name in infos:
                raise self._error(f"tensor {shown(name)} is there twice")
            infos[name] = self._tensor(name)
        return Header(fields, tuple(infos.values()), self._position, self._file_bytes)

    def _start(self) -> tuple[int, int]:
        """Check the magic number and the version, and return the numbers of tensors and fields."""
        start = bytes(self._read[self._take(len(MAGIC), "the magic number") : self._position])
        if start != MAGIC:
            raise self._error(f"it begins with {start!r}, and a GGUF file begins with {MAGIC!r}")
        version = self._u32("the version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in (1, *VERSIONS):
                raise self._error("it is a big-endian GGUF file; only little-endian files are read")
            raise self._error(f"its version is {version}; GGUF versions {VERSIONS[0]} and {VERSIONS[1]} are read")
        num_tensors, num_fields = self._u64("the number of tensors"), self._u64("the number of fields")
        self._check_count("tensors", num_tensors, MAX_TENSORS, MIN_TENSOR_BYTES)
        self._check_count("fields", num_fields, MAX_FIELDS, MIN_FIELD_BYTES)
        return num_tensors, num_fields

    def _check_count(self, things: str, count: int, most: int, item_bytes: int) -> None:
        """Refuse a count above its limit, or with too few remaining bytes."""
        left = self._limit - self._position
        if count > most or count * item_bytes > left:
            allowed = min(most, left // item_bytes)
            raise self._error(f"it names {count:,} {things}; with {left:,} bytes left, {allowed:,} are allowed")

    def _name(self, subject: str) -> str:
        name = self._string(subject, MAX_NAME_BYTES)
        if not name:
            raise self._error(f"{subject} is empty")
        return name

    def _tensor(self, name: str) -> TensorInfo:
        subject = f"tensor {shown(name)}"
        num_dims = self._u32(subject)
        if num_dims > MAX_DIMS:
            raise self._error(f"{subject} has {num_dims:,} dimensions; {MAX_DIMS} are allowed")
        sizes = struct.unpack_from(f"<{num_dims}Q", self._read, self._take(8 * num_dims, subject))
        return TensorInfo(name, sizes, self._u32(subject), self._u64(subject))

    def _value(self, name: str, subject: str) -> Any:
        kind = self._u32(subject)
        if kind == STRING:
            # A description may be decoded with errors; a changed token or template would change the model's results.
            errors = "strict" if name.startswith("tokenizer.") else "replace"
            return self._string(subject, MAX_STRING_BYTES, errors)
        if kind == ARRAY:
            return self._array(subject)
        return self._numbers(subject, kind, 1)[0]

    def _array(self, subject: str) -> list[Any]:
        kind, count = self._u32(subject), self._u64(subject)
        self._num_values += count
        if self._num_values > MAX_VALUES:
            raise self._error(
                f"{subject} is an array of {count:,} values; all arrays together may have {MAX_VALUES:,} values"
            )
        if kind == ARRAY:
            raise self._error(f"{subject} is an array of arrays; arrays of numbers, truth values and strings are read")
        return self._strings(subject, count) if kind == STRING else self._numbers(subject, kind, count)

    def _numbers(self, subject: str, kind: int, count: int) -> list[Any]:
        code = NUMBERS.get(kind)
        if code is None:
            raise self._error(f"{subject} has values of type {kind}; 0 to 12 are allowed")
        layout = f"<{count}{code}"
        start = self._take(struct.calcsize(layout), subject)
        values: list[Any] = list(struct.unpack_from(layout, self._read, start))
        if kind != BOOL:
            return values
        if max(values, default=0) > 1:
            raise self._error(f"{subject} has the truth value {max(values)}; 0 and 1 are allowed")
        return list(map(bool, values))

    def _strings(self, subject: str, count: int) -> list[str]:
        """Return the strings of an array, in a loop without calls, since vocabularies have hundreds of thousands."""
        self._check_count(f"strings in {subject}", count, MAX_VALUES, U64.size)
        strings: list[str] = []
        read, unpack, position, loaded = self._read, U64.unpack_from, self._position, len(self._read)
        with self._utf8(subject, strings):
            for _ in range(count):
                start = position + 8
                if start > loaded:
                    loaded = self._load(start, subject)
                position = start + unpack(read, position)[0]
                # A string longer than the limit, which is longer than a chunk, cannot be read yet.
                if position > loaded:
                    self._check_length(f"string {len(strings):,} of {subject}", position - start, MAX_STRING_BYTES)
                    loaded = self._load(position, subject)
                strings.append(read[start:position].decode())
        self._position = position
        return strings

    def _string(self, subject: str, max_bytes: int, errors: str = "strict") -> str:
        length = self._u64(subject)
        self._check_length(subject, length, max_bytes)
        start = self._take(length, subject)
        with self._utf8(subject):
            return self._read[start : self._position].decode(errors=errors)

    def _check_length(self, subject: str, length: int, max_bytes: int) -> None:
        if length > max_bytes:
            raise self._error(f"{subject} has {length:,} bytes; {max_bytes:,} are allowed")

    def _u32(self, subject: str) -> int:
        return int(U32.unpack_from(self._read, self._take(4, subject))[0])

    def _u64(self, subject: str) -> int:
        return int(U64.unpack_from(self._read, self._take(8, subject))[0])

    def _take(self, num_bytes: int, subject: str) -> int:
        """Read the next bytes, advance by them, and return their position."""
        start = self._position
        if start + num_bytes > len(self._read):
            self._load(start + num_bytes, subject)
        self._position = start + num_bytes
        return start

    def _load(self, end: int, subject: str) -> int:
        """Read at least up to an offset, and return the number of bytes that were read."""
        if end <= self._limit:
            while len(self._read) < end:
                missing = min(max(end - len(self._read), CHUNK_BYTES), self._limit - len(self._read))
                part = self._stream.read(missing)
                if not part:
                    raise self._error(f"it became shorter while {subject} was read")
                self._read += part
            return len(self._read)
        if end > self._file_bytes:
            raise self._error(f"{subject} would end at byte {end:,}, and the file has {self._file_bytes:,} bytes")
        raise self._error(f"{subject} would end at byte {end:,}; a header may have {self._max_bytes:,} bytes")

    @contextmanager
    def _utf8(self, subject: str, strings: list[str] | None = None) -> Iterator[None]:
        """Turn a decoding error into an error that names the string, or the next string of an array."""
        try:
            yield
        except UnicodeDecodeError as error:
            which = subject if strings is None else f"string {len(strings):,} of {subject}"
            raise self._error(f"{which} is not UTF-8 at its byte {error.start:,}") from None

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {message}")
