"""Writer of GGUF headers, version 3, which `quire.models.gguf.header` reads."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Final, NamedTuple

from quire.models.gguf.header import ARRAY, BOOL, MAGIC, STRING, U32, U64
from quire.models.gguf.reader import DEFAULT_ALIGNMENT
from quire.models.gguf.tensor_types import TensorType

UINT32, INT32, FLOAT32 = 4, 5, 6
FORMATS: Final = {UINT32: "I", INT32: "i", FLOAT32: "f", BOOL: "?"}
FieldValue = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]


class TensorPlan(NamedTuple):
    """The description of a tensor that will be written to a file.

    Args:
        name: name in the file.
        type: block type or dtype.
        shape: sizes of the dimensions, the slowest first.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the tensor."""
        return prod(self.shape) // self.type.block_values * self.type.block_bytes

    @property
    def padding(self) -> int:
        """Number of bytes between the tensor and the next one."""
        return -self.num_bytes % DEFAULT_ALIGNMENT


def encode_header(fields: Mapping[str, FieldValue], tensors: Sequence[TensorPlan]) -> bytes:
    """Return the header of a file, up to the first byte of the first tensor."""
    parts = [MAGIC, U32.pack(3), U64.pack(len(tensors)), U64.pack(len(fields))]
    for name, value in fields.items():
        kind, content = _encode(value)
        parts += [_string(name), U32.pack(kind), content]
    offset = 0
    for tensor in tensors:
        sizes = b"".join(map(U64.pack, reversed(tensor.shape)))
        parts += [_string(tensor.name), U32.pack(len(tensor.shape)), sizes, U32.pack(tensor.type.id), U64.pack(offset)]
        offset += tensor.num_bytes + tensor.padding
    header = b"".join(parts)
    return header + bytes(-len(header) % DEFAULT_ALIGNMENT)


def _encode(value: FieldValue) -> tuple[int, bytes]:
    """Return the number of a value's type, and the value's bytes."""
    if isinstance(value, str):
        return STRING, _string(value)
    if isinstance(value, bool | int | float):
        kind = BOOL if isinstance(value, bool) else UINT32 if isinstance(value, int) else FLOAT32
        return kind, struct.pack(f"<{FORMATS[kind]}", value)
    kind = STRING if isinstance(value[0], str) else INT32 if isinstance(value[0], int) else FLOAT32
    start = U32.pack(kind) + U64.pack(len(value))
    if kind == STRING:
        return ARRAY, start + b"".join(_string(str(item)) for item in value)
    return ARRAY, start + struct.pack(f"<{len(value)}{FORMATS[kind]}", *value)


def _string(text: str) -> bytes:
    raw = text.encode()
    return U64.pack(len(raw)) + raw
