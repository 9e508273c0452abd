"""Reading of untrusted files: regular files only, up to a maximum size."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from quire.platform.bounded.json_text import parse

# O_NONBLOCK exists on POSIX; O_BINARY on Windows, where the text mode would change bytes.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: the file cannot be opened, or is not regular: reading a pipe may block, and a device may have no end.
    """
    file = os.open(path, _FLAGS)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(file, "rb")


def user_path(text: str) -> Path:
    """Return a path as a user wrote it, with `~` and `~NAME` expanded, unless there is no user of the name."""
    return Path(os.path.expanduser(text))


def reason_of(error: OSError | ValueError) -> str:
    """Return why a file cannot be read or written, without its path and the number of the error."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: see `open_file`; or the file is longer than `max_bytes`.
    """
    with open_file(path) as stream:
        # The file may have grown since `fstat`.
        is_short = os.fstat(stream.fileno()).st_size <= max_bytes
        raw = stream.read(max_bytes + 1) if is_short else None
    if raw is None or len(raw) > max_bytes:
        raise OSError(errno.EFBIG, f"it is longer than {max_bytes} bytes", str(path))
    return raw


def read_json(path: Path, max_bytes: int) -> Any:
    """Return the value of a JSON file, which may contain NaN, infinities and a byte order mark.

    Raises:
        OSError: see `read_file`.
        ValueError: the content is not JSON, or is nested too deeply.
    """
    raw = read_file(path, max_bytes)
    return parse(raw.decode(json.detect_encoding(raw)).encode("utf-8", "surrogatepass"), is_strict=False)
