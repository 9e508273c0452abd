"""A model's tokenizer as the text of a `tokenizer.json`, for processes that read it themselves.

The library holds the interpreter lock while it writes one: 0.2 s for a vocabulary of 262,144 tokens. So other processes
read the model's files again, unless they have changed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import tokenizers

from quire.platform.bounded.files import read_file
from quire.platform.bounded.process import RemoteCall
from quire.text.vocabulary.components import guarded

# Settings that serving switches off; a file that has one is read and written by the library.
_SWITCHES: Final = (rb'"truncation"\s*:\s*null\b', rb'"padding"\s*:\s*null\b')


class FileVersion(NamedTuple):
    """The version of a file: what changes when it is written or replaced.

    Args:
        path: the file.
        num_bytes, mtime_ns, inode: its size, the time of its last change, and its number.
    """

    path: str
    num_bytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileVersion | None:
        """Return the present version of a file; None where there is none."""
        try:
            found = path.stat()
        except OSError:
            return None
        return cls(str(path.absolute()), found.st_size, found.st_mtime_ns, found.st_ino)


class JsonSource(NamedTuple):
    """Where a tokenizer's JSON comes from.

    Args:
        version: version of the file that was read.
        call: call that reads it again.
    """

    version: FileVersion
    call: RemoteCall

    @classmethod
    def of(cls, path: Path, function: str, *arguments: Any) -> JsonSource | None:
        """Return the source in a file that is about to be read; None where there is no file."""
        version = FileVersion.of(path)
        return None if version is None else cls(version, RemoteCall(f"{__name__}:{function}", arguments))

    @property
    def is_unchanged(self) -> bool:
        """True while the file is as it was."""
        return FileVersion.of(Path(self.version.path)) == self.version


def of_file(path: str, max_bytes: int) -> str:
    """Return the JSON of a `tokenizer.json`, without truncation and padding."""
    raw = read_file(Path(path), max_bytes)
    if all(re.search(pattern, raw) for pattern in _SWITCHES):
        return raw.decode()
    return as_json(guarded(tokenizers.Tokenizer.from_buffer, raw))


def of_gguf(path: str, pre: str | None) -> str:
    """Return the JSON of a GGUF file's tokenizer; the arguments are those of `read_gguf_tokenizer`."""
    # That module imports this one.
    from quire.models.gguf.header import read_header
    from quire.text.tokenizers.gguf_tokenizer import read_gguf_tokenizer

    return as_json(read_gguf_tokenizer(Path(path), read_header(Path(path)).fields, pre).library)


def as_json(library: Any) -> str:
    """Return the JSON of a tokenizer of the library, whose truncation and padding are switched off."""
    library.no_truncation()
    library.no_padding()
    return str(library.to_str())


def same(text: str) -> str:
    """Return a JSON that is known."""
    return text
