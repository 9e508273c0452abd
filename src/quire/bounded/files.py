"""Reading of untrusted files: regular files only, up to a maximum size."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from quire.bounded.json_text import parse


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: the file cannot be opened, is not regular (reading a pipe may block, and a device may have no end), or
            is longer than `max_bytes`.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    with open(file, "rb") as stream:
        # The file may have grown since `fstat`.
        raw = stream.read(max_bytes + 1) if status.st_size <= max_bytes else None
    if raw is None or len(raw) > max_bytes:
        raise OSError(errno.EFBIG, f"it is longer than {max_bytes} bytes", str(path))
    return raw


def read_json(path: Path, max_bytes: int) -> Any:
    """Return the value of a JSON file, which may have NaN, infinities and a byte order mark.

    Raises:
        OSError: see `read_file`.
        ValueError: the content is not JSON, or is nested too deeply.
    """
    raw = read_file(path, max_bytes)
    return parse(raw.decode(json.detect_encoding(raw)).encode("utf-8", "surrogatepass"), is_strict=False)
