"""Malicious and damaged GGUF files, each a function of a seed."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError
from quire.models.gguf.reader import GGUFFile
from quire.models.gguf.tensor_types import F32, Q4_0, Q4_K, Q6_K, Q8_0, TENSOR_TYPES
from tests.text.test_chat import BOMBS

U8, I8, U16, U32, I32, FLOAT, BOOL, STRING, ARRAY, U64 = 0, 1, 2, 4, 5, 6, 7, 8, 9, 10
HUGE = (2**60, 2**63, 2**64 - 1, 2**64 - 8, 2**32, 2**31, 10**9, 10**6)


def text(value: bytes, length: int | None = None) -> bytes:
    """Return a string as a file has it, which may lie about its length."""
    return struct.pack("<Q", len(value) if length is None else length) + value


def array(kind: int, items: list[bytes], count: int | None = None) -> bytes:
    """Return an array as a file has it, which may lie about its length."""
    return struct.pack("<IQ", kind, len(items) if count is None else count) + b"".join(items)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


@dataclass
class StoredField:
    """A field as it is written."""

    name: bytes
    kind: int
    value: bytes

    def encoded(self) -> bytes:
        return text(self.name) + u32(self.kind) + self.value


@dataclass
class TensorEntry:
    """A description of a tensor as it is written; sizes are fastest first."""

    name: bytes
    sizes: list[int]
    kind: int
    offset: int
    num_dims: int | None = None

    def encoded(self) -> bytes:
        num_dims = len(self.sizes) if self.num_dims is None else self.num_dims
        place = struct.pack("<IQ", self.kind, self.offset)
        return text(self.name) + u32(num_dims) + struct.pack(f"<{len(self.sizes)}Q", *self.sizes) + place


@dataclass
class Layout:
    """A file before it is written: any part of it can be changed."""

    fields: list[StoredField]
    tensors: list[TensorEntry]
    data: bytes
    start: bytes = b"GGUF" + u32(3)
    num_tensors: int | None = None
    num_fields: int | None = None
    alignment: int = 32

    def encoded(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_fields = len(self.fields) if self.num_fields is None else self.num_fields
        parts = [self.start, struct.pack("<QQ", num_tensors, num_fields)]
        header = b"".join(
            [*parts, *(each.encoded() for each in self.fields), *(each.encoded() for each in self.tensors)]
        )
        return header + bytes(-len(header) % self.alignment) + self.data


def good(*, prefix: str = "blk.0", extra: list[StoredField] | None = None) -> Layout:
    """Return the layout of a good file."""
    tokens = [text(f"token{number}".encode()) for number in range(20)]
    fields = [
        StoredField(b"general.architecture", STRING, text(b"llama")),
        StoredField(b"llama.block_count", U32, u32(1)),
        StoredField(b"llama.rope.freq_base", FLOAT, struct.pack("<f", 1e4)),
        StoredField(b"tokenizer.ggml.add_bos_token", BOOL, b"\x01"),
        StoredField(b"tokenizer.ggml.tokens", ARRAY, array(STRING, tokens)),
        StoredField(b"tokenizer.ggml.scores", ARRAY, array(FLOAT, [struct.pack("<f", 0.5)] * 20)),
        StoredField(b"tokenizer.ggml.token_type", ARRAY, array(I32, [struct.pack("<i", 1)] * 20)),
        StoredField(b"tokenizer.chat_template", STRING, text(b"{{ messages[0].content }}")),
        *(extra or []),
    ]
    tensors, data = [], b""
    for block, rows in ((F32, 8), (Q4_0, 3), (Q8_0, 4), (Q4_K, 2), (Q6_K, 2)):
        num_blocks = 2
        name = f"{prefix}.{block.name}.weight".encode()
        tensors.append(TensorEntry(name, [num_blocks * block.block_values, rows], block.id, len(data)))
        size = num_blocks * block.block_bytes * rows
        data += b"\x11" * size + bytes(-size % 32)
    return Layout(fields, tensors, data)


class GGUFMaker:
    """Makes damaged GGUF files."""

    def __init__(self) -> None:
        kinds = (
            _truncated, _counts, _offsets, _names, _types, _shapes, _alignment, _versions, _split, _strings, _flipped,
            _file,
        )  # fmt: skip
        self.kinds: dict[str, Callable[[Path, random.Random], Path]] = {each.__name__[1:]: each for each in kinds}

    def make(self, folder: Path, kind: str, seed: int) -> Path:
        """Write the file of a kind and a seed into an empty folder, and return the path to open."""
        return self.kinds[kind](folder, random.Random(f"{kind} {seed}"))


def _written(folder: Path, content: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return path


def _truncated(folder: Path, rng: random.Random) -> Path:
    """The file ends somewhere: in its header or in its data."""
    layout = good()
    content = layout.encoded()
    header = len(content) - len(layout.data)
    return _written(folder, content[: rng.randrange(rng.choice([header, len(content)]))])


def _counts(folder: Path, rng: random.Random) -> Path:
    """A count or a length is huge, or one too large."""
    layout, count = good(), rng.choice(HUGE)
    which = rng.randrange(8)
    if which == 0:
        layout.num_tensors = rng.choice([count, len(layout.tensors) + 1, 0])
    elif which == 1:
        layout.num_fields = rng.choice([count, len(layout.fields) + 1, 0])
    elif which == 2:
        layout.fields[4].value = array(STRING, [text(b"a")] * 20, count)
    elif which == 3:
        kind = rng.choice([U8, I32, FLOAT, BOOL, U64])
        layout.fields[5].value = array(kind, [b"\x01" * 8] * 20, rng.choice([count, 100, 2**21]))
    elif which == 4:
        layout.fields[7].value = text(b"a" * 20, count)
    elif which == 5:
        layout.fields[4].value = array(STRING, [text(b"a")] * 19 + [text(b"a", count)])
    elif which == 6:
        layout.tensors[2].num_dims = rng.choice([count % 2**32, 5, 3, 1])
    else:
        # A name that lies about its length.
        raw = layout.encoded()
        name = text(rng.choice([layout.fields[1].name, layout.tensors[1].name]))
        return _written(folder, raw.replace(name, text(name[8:], count)))
    return _written(folder, layout.encoded())


def _offsets(folder: Path, rng: random.Random) -> Path:
    """A tensor lies elsewhere: behind the end, on another one, at an odd place."""
    layout = good()
    tensor = rng.choice(layout.tensors)
    end = len(layout.data)
    places = [*HUGE, 2**64 - 32, end, end + 32, end - 32, 0, 32, 64, 1, 7, tensor.offset + 32, tensor.offset + 1]
    tensor.offset = rng.choice(places)
    return _written(folder, layout.encoded())


def _names(folder: Path, rng: random.Random) -> Path:
    """A name is there twice, empty, too long, or no text."""
    layout = good()
    name = rng.choice(
        [b"", b"\xff", b"\xc3", b"a\xed\xa0\x80", b"x" * (2**16 + 1), b"\x00", "é".encode() * 9, b"../../x"]
    )
    named: list[Any] = rng.choice([layout.fields, layout.tensors])
    if rng.random() < 0.3:
        name = named[0].name
    named[rng.randrange(1, len(named))].name = name
    return _written(folder, layout.encoded())


def _types(folder: Path, rng: random.Random) -> Path:
    """A value or a tensor is of a type that does not exist, or of another one."""
    layout = good()
    which = rng.randrange(5)
    if which == 0:
        rng.choice(layout.fields).kind = rng.choice([*range(13), 13, 255, 2**31, 2**32 - 1])
    elif which == 1:
        rng.choice(layout.tensors).kind = rng.choice([*range(45), 255, 2**31, 2**32 - 1])
    elif which == 2:
        depth = rng.choice([1, 2, 1000, 10**5])
        layout.fields[4].value = struct.pack("<IQ", ARRAY, 1) * depth + array(U8, [b"\x01"])
    elif which == 3:
        layout.fields[3].value = bytes([rng.choice([2, 127, 255])])
    else:
        layout.fields[4].value = array(rng.choice([13, 99, 2**32 - 1, BOOL]), [b"\x03"] * 20)
    return _written(folder, layout.encoded())


def _shapes(folder: Path, rng: random.Random) -> Path:
    """A tensor has sizes of nothing, of very much, or whose product is small only in 64 bits."""
    layout = good()
    row = TENSOR_TYPES[(tensor := rng.choice(layout.tensors)).kind].block_values
    shapes: list[list[int]] = [
        [0], [row, 0], [row + 1, 1], [row // 2 or 7, 2], [2**32, 2**32], [2**63, 2], [2**60, 2**60, 2**60, 2**60],
        [row, 2**64 - 1], [2**64 - 256], [row] * 5, [row] * 4, [], [row, 1, 1, 1], [row, 10**6], [1, row],
    ]  # fmt: skip
    tensor.sizes = rng.choice(shapes)
    return _written(folder, layout.encoded())


def _alignment(folder: Path, rng: random.Random) -> Path:
    """The alignment is no power of two, or the file does not follow it."""
    numbers = [(U32, u32(value)) for value in (0, 1, 3, 16, 31, 33, 64, 2**12, 2**31, 2**32 - 1)]
    wide = [(U64, struct.pack("<Q", value)) for value in (2**40, 2**63, 2**64 - 1, 32)]
    others = [(STRING, text(b"32")), (FLOAT, struct.pack("<f", 32)), (I32, struct.pack("<i", -32)), (BOOL, b"\x01")]
    kind, value = rng.choice([*numbers, *wide, *others, (ARRAY, array(U32, [u32(32)]))])
    layout = good(extra=[StoredField(b"general.alignment", kind, value)])
    layout.alignment = rng.choice([1, 32, 64])
    return _written(folder, layout.encoded())


def _versions(folder: Path, rng: random.Random) -> Path:
    """It is of another version, another byte order, or something else."""
    layout = good()
    versions = [0, 1, 4, 9, 255, 2**16, 2**32 - 1]
    starts = [b"GGUF" + u32(version) for version in versions]
    starts += [b"GGUF" + version.to_bytes(4, "big") for version in (1, 2, 3)]
    starts += [b"GGML" + u32(3), b"FUGG" + u32(3), b"gguf" + u32(3), b"PK\x03\x04" + u32(3), bytes(8), b"\x80\x02}q"]
    layout.start = rng.choice(starts)
    return _written(folder, layout.encoded())


def _split(folder: Path, rng: random.Random) -> Path:
    """A part is missing, twice, damaged, of another file, or misnamed."""
    num_parts = 3
    names = [f"model-{number + 1:05}-of-{num_parts:05}.gguf" for number in range(num_parts)]

    def part(number: int, *, count: int = num_parts, prefix: str | None = None, kind: int = U16) -> bytes:
        numbers = ((b"split.no", number), (b"split.count", count))
        extra = [StoredField(name, kind, value.to_bytes({U16: 2, U64: 8}[kind], "little")) for name, value in numbers]
        extra.append(StoredField(b"split.tensors.count", I32, struct.pack("<i", rng.choice([15, 15, 15, 5, -1]))))
        return good(prefix=prefix or f"blk.{number}", extra=extra).encoded()

    contents = [part(number) for number in range(num_parts)]
    other = rng.randrange(num_parts)
    wrong = [
        part(other, prefix="blk.7"), part((other + 1) % 3), part(other, prefix=f"blk.{(other + 1) % 3}"),
        part(other, count=rng.choice([0, 1, 2, 4, 2**16 - 1])), part(2**60, count=2**60, kind=U64),
        contents[other][: rng.randrange(len(contents[other]))], good().encoded(), b"", b"no file",
    ]  # fmt: skip
    contents[other] = rng.choice(wrong)
    for name, content in zip(names, contents, strict=True):
        (folder / name).write_bytes(content)
    which = rng.randrange(5)
    if which == 0:
        (folder / names[rng.randrange(1, num_parts)]).unlink()
    elif which == 1:
        return (folder / names[0]).rename(
            folder / rng.choice(["model.gguf", "model-00001-of-99999.gguf", "a-1-of-3.gguf"])
        )
    elif which == 2:
        return folder / names[rng.randrange(num_parts)]
    elif which == 3:
        (folder / names[1]).unlink()
        (folder / names[1]).symlink_to(rng.choice([names[0], names[1], "/dev/zero", "/"]))
    return folder / names[0]


def _strings(folder: Path, rng: random.Random) -> Path:
    """A string is no text, too long, or a template that takes time and memory where it is rendered."""
    layout = good()
    bad = [b"\xff\xfe", b"a" * 100 + b"\x80", b"\xed\xa0\x80", b"x" * (4 << 20), b"x" * ((4 << 20) + 1)]
    templates = [bomb.encode() for bomb in BOMBS.values()]
    value = rng.choice([rng.choice(bad), rng.choice(templates)])
    if rng.random() < 0.5:
        layout.fields[7].value = text(value)
    else:
        layout.fields[4].value = array(STRING, [text(b"a"), text(value), text(b"b")])
    return _written(folder, layout.encoded())


def _flipped(folder: Path, rng: random.Random) -> Path:
    """Some bits of the header are others."""
    layout = good()
    content = bytearray(layout.encoded())
    for _ in range(rng.choice([1, 2, 8, 64])):
        content[rng.randrange(len(content) - len(layout.data))] ^= 1 << rng.randrange(8)
    return _written(folder, bytes(content))


def _file(folder: Path, rng: random.Random) -> Path:
    """It is no file, or there is something else in it."""
    path, content = folder / "model.gguf", good().encoded()
    which = rng.randrange(8)
    if which == 0:
        os.mkfifo(path)
    elif which == 1:
        path.symlink_to(rng.choice(["/dev/zero", "/dev/full", "/proc/self/mem", "/proc/self/maps", path.name, "/"]))
    elif which == 2:
        path.mkdir()
    elif which == 3:
        path.write_bytes(rng.choice([b"", content[:24], content[:8]]))
        os.truncate(path, rng.choice([1, 10**9, 10**12]))
    elif which == 4:
        return rng.choice([folder / "nowhere.gguf", folder / "a\x00b.gguf", folder / ("x" * 300)])
    else:
        noise = [rng.randbytes(2000), b"GGUF" + u32(3) + rng.randbytes(2000), content + rng.randbytes(100), content * 2]
        path.write_bytes(rng.choice(noise))
    return path


def largest(folder: Path, which: str) -> Path:
    """Write a file whose header takes as much memory as one may take, or a little more."""
    wide = text(b"x" * 4194200 + "\U0001f600".encode())
    fields, tensors = {
        "strings": ([StoredField(b"a", ARRAY, array(STRING, [text(b"abc")] * (2**21 - 1)))], []),
        "wide strings": ([StoredField(b"%d" % n, STRING, wide) for n in range(7)], []),
        "integers": ([StoredField(b"a", ARRAY, array(U64, [b"\x01" * 8] * 2**21))], []),
        "fields": ([StoredField(b"%d" % n, STRING, text(b"x" * 900)) for n in range(2**15)], []),
        "tensors": ([], [TensorEntry(b"%0900d" % n, [8], F32.id, n * 32) for n in range(2**15)]),
        "values": ([StoredField(b"a", ARRAY, array(U8, [b"\x01"] * (2**21 + 1)))], []),
        "bytes": ([StoredField(b"%d" % n, STRING, text(b"x" * (4 << 20))) for n in range(9)], []),
    }[which]  # fmt: skip
    path = _written(folder, Layout(fields, tensors, b"").encoded())
    os.truncate(path, path.stat().st_size + 32 * len(tensors) + 32)
    return path


def open_reader(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that opens a file in a process of its own, and says what came of it."""
    del setup

    def answer(path: bytes) -> bytes:
        try:
            file = GGUFFile.open(Path(os.fsdecode(path)))
        except CheckpointError as error:
            return f"refused: {error}".encode()
        return f"opened: {len(file.fields)} fields, {len(file.tensors)} tensors".encode()

    return answer
