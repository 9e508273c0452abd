"""GGUF files, whole or split into several: their fields, and the places of their tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

from quire.errors import CheckpointError, shown
from quire.models.gguf.header import MAX_HEADER_BYTES, MAX_TENSORS, Header, TensorInfo, read_header
from quire.models.gguf.tensor_types import OTHER_TYPES, TENSOR_TYPES, TensorType

DEFAULT_ALIGNMENT: Final = 32
# Name of a part of a split file: its stem, its number from 1, and the number of parts.
_PART_NAME: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII | re.DOTALL)


class GGUFTensor(NamedTuple):
    """The place and the type of a tensor; its bytes are inside its file and overlap with no other tensor.

    Args:
        name: name of the tensor.
        type_id: number of its type, one of `TENSOR_TYPES`.
        shape: sizes of its dimensions, slowest first, as torch has them (a file has them fastest first).
        path: file that has it.
        offset: offset of its first byte in the file.
        num_bytes: number of its bytes.
    """

    name: str
    type_id: int
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A GGUF file whose header was read and checked, or all parts of a split file.

    Args:
        path: the file, or the first part of a split file.
        fields: values by name: numbers, booleans, strings, and lists of them; of a split file, from the first part.
        tensors: tensors by name.
    """

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Read the header of a file, or the headers of all parts for the first part of a split file."""
        header = read_header(path)
        tensors = {tensor.name: tensor for tensor in _placed(path, header)}
        left = MAX_HEADER_BYTES - header.num_bytes
        paths = _parts(path, header.fields)
        for number, part in enumerate(paths[1:], 1):
            header_of_part = read_header(part, left)
            left -= header_of_part.num_bytes
            for key, value in (("split.count", len(paths)), ("split.no", number)):
                if _count(part, header_of_part.fields, key) != value:
                    actual = shown(header_of_part.fields.get(key))
                    raise CheckpointError(f"{part}: {key} is {actual}; as a part of {path.name} it must be {value}")
            for tensor in _placed(part, header_of_part):
                if tensor.name in tensors:
                    first = tensors[tensor.name].path
                    raise CheckpointError(f"{part}: tensor {shown(tensor.name)} is in {first.name} as well")
                tensors[tensor.name] = tensor
            if len(tensors) > MAX_TENSORS:
                raise CheckpointError(f"{part}: with it there are more than {MAX_TENSORS:,} tensors")
        _check_total(path, header.fields, len(tensors))
        return cls(path, header.fields, tensors)


def _parts(path: Path, fields: Mapping[str, Any]) -> list[Path]:
    """Return the parts of a split file, or the file; `path` comes first."""
    count, name = _count(path, fields, "split.count") or 1, _PART_NAME.fullmatch(path.name)
    if count == 1 and (name is None or int(name[3]) == 1):
        return [path]
    if name is None or int(name[3]) != count:
        raise CheckpointError(
            f"{path}: split.count is {count}, and the name of a part must end with -00001-of-{count:05}.gguf"
        )
    paths = [path.with_name(f"{name[1]}-{number:05}-of-{name[3]}.gguf") for number in range(1, count + 1)]
    number = _count(path, fields, "split.no")
    if number != 0 or path.name != paths[0].name:
        raise CheckpointError(f"{path} is not the first part (split.no is {number}); name {paths[0].name}")
    missing = next((part for part in paths if not part.is_file()), None)
    if missing is not None:
        raise CheckpointError(f"{missing} is missing: {path.name} is the first of {count} parts")
    return paths


def _count(path: Path, fields: Mapping[str, Any], key: str) -> int | None:
    """Return a field that must be an integer below 2^31; None if it is missing."""
    value = fields.get(key)
    if value is None or (type(value) is int and 0 <= value < 1 << 31):
        return value
    raise CheckpointError(f"{path}: {key} is {shown(value)}; a whole number below 2^31 is needed")


def _check_total(path: Path, fields: Mapping[str, Any], num_tensors: int) -> None:
    total = _count(path, fields, "split.tensors.count")
    if total is not None and total != num_tensors:
        raise CheckpointError(f"{path}: split.tensors.count is {total:,}, but the parts have {num_tensors:,} tensors")


def _placed(path: Path, header: Header) -> list[GGUFTensor]:
    """Check the types, sizes and places of a file's tensors, and return them."""
    alignment = header.fields.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment < 1 << 31 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {shown(alignment)}; a power of two is needed")
    start = -(-header.num_bytes // alignment) * alignment
    tensors = [_place(path, info, start, alignment) for info in header.tensors]
    for tensor in tensors:
        if tensor.offset + tensor.num_bytes > header.file_bytes:
            raise CheckpointError(
                f"{path}: tensor {shown(tensor.name)} lies in bytes {tensor.offset:,} to "
                f"{tensor.offset + tensor.num_bytes:,}, and the file has {header.file_bytes:,} bytes"
            )
    for first, second in pairwise(sorted(tensors, key=lambda tensor: tensor.offset)):
        if first.offset + first.num_bytes > second.offset:
            raise CheckpointError(
                f"{path}: tensors {shown(first.name)} and {shown(second.name)} overlap at byte {second.offset:,}"
            )
    return tensors


def _place(path: Path, info: TensorInfo, start: int, alignment: int) -> GGUFTensor:
    """Return the place of a tensor; `start` is the offset of the file's data."""
    subject = f"{path}: tensor {shown(info.name)}"
    block = _type_of(subject, info.type_id)
    row = info.sizes[0] if info.sizes else 1
    num_values = prod(info.sizes)
    if not num_values:
        raise CheckpointError(f"{subject} has shape {_shape(info.sizes)}; sizes from 1 are needed")
    if row % block.block_values:
        raise CheckpointError(
            f"{subject} of type {block.name} has rows of {row:,} values; a multiple of {block.block_values} is needed"
        )
    if info.offset % alignment:
        raise CheckpointError(f"{subject} has offset {info.offset:,}; a multiple of {alignment} (alignment) is needed")
    num_bytes = num_values // block.block_values * block.block_bytes
    return GGUFTensor(info.name, block.id, info.sizes[::-1], path, start + info.offset, num_bytes)


def _type_of(subject: str, type_id: int) -> TensorType:
    block = TENSOR_TYPES.get(type_id)
    if block is None:
        name = OTHER_TYPES.get(type_id, "which is unknown")
        served = ", ".join(tensor_type.name for tensor_type in TENSOR_TYPES.values())
        raise CheckpointError(f"{subject} is of type {type_id} ({name}); {served} are served")
    return block


def _shape(sizes: Sequence[int]) -> str:
    return "[" + ", ".join(f"{size:,}" for size in sizes[::-1]) + "]"
