"""A model's tokenizer as the text of a `tokenizer.json`, for other processes.

The library holds the interpreter lock while it writes this text: 0.2 s for a vocabulary of 262,144 tokens. So other
processes read the model's files again, unless the files have changed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import tokenizers

from quire.platform.bounded.files import read_file
from quire.platform.bounded.process import RemoteCall
from quire.text.vocabulary.components import guarded

# Patterns of settings that are off; a file in which one is on is converted by the library, which switches it off.
_SWITCHES: Final = (rb'"truncation"\s*:\s*null\b', rb'"padding"\s*:\s*null\b')


class FileVersion(NamedTuple):
    """The version of a file, which changes when the file is written or replaced.

    Args:
        path: absolute path.
        num_bytes, mtime_ns, inode: size, time of the last change, and inode number of the file.
    """

    path: str
    num_bytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> FileVersion | None:
        """Return the present version of a file; None if it does not exist."""
        try:
            stat = path.stat()
        except OSError:
            return None
        return cls(str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ino)


class JsonSource(NamedTuple):
    """The file from which a tokenizer's JSON can be read again.

    Args:
        version: version of the file that was read.
        call: call that reads the file again.
    """

    version: FileVersion
    call: RemoteCall

    @classmethod
    def of(cls, path: Path, function: str, *arguments: Any) -> JsonSource | None:
        """Return the source for a file that is about to be read; None if it does not exist."""
        version = FileVersion.of(path)
        return None if version is None else cls(version, RemoteCall(f"{__name__}:{function}", arguments))

    @property
    def is_unchanged(self) -> bool:
        """True while the file has the same version."""
        return FileVersion.of(Path(self.version.path)) == self.version


def of_file(path: str, max_bytes: int) -> str:
    """Return the JSON of a `tokenizer.json`, without truncation and padding."""
    raw = read_file(Path(path), max_bytes)
    if all(re.search(pattern, raw) for pattern in _SWITCHES):
        return raw.decode()
    return as_json(guarded(tokenizers.Tokenizer.from_buffer, raw))


def of_gguf(path: str, pre: str | None) -> str:
    """Return the JSON of a GGUF file's tokenizer; `pre` is as in `read_gguf_tokenizer`."""
    # That module imports this one.
    from quire.models.gguf.header import read_header
    from quire.text.tokenizers.gguf_tokenizer import read_gguf_tokenizer

    return as_json(read_gguf_tokenizer(Path(path), read_header(Path(path)).fields, pre).library)


def as_json(library: Any) -> str:
    """Return the JSON of a tokenizer of the library, and switch off its truncation and padding."""
    library.no_truncation()
    library.no_padding()
    return str(library.to_str())


def same(text: str) -> str:
    """Return the argument, for a call that carries the JSON itself."""
    return text
