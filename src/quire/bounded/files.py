"""Files that somebody else has written, read within bounds: regular ones only, and no longer than they may be."""

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
        OSError: it cannot be opened, is no regular file (a pipe, say, could be waited for in vain, and a device read
            for ever), or is longer than `max_bytes`.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    with open(file, "rb") as stream:
        # It may have grown since.
        raw = stream.read(max_bytes + 1) if status.st_size <= max_bytes else None
    if raw is None or len(raw) > max_bytes:
        raise OSError(errno.EFBIG, f"it is longer than {max_bytes} bytes", str(path))
    return raw


def read_json(path: Path, max_bytes: int) -> Any:
    """Return what a file of JSON holds; NaN and infinities may be in it, and a mark of its encoding before it.

    Raises:
        OSError: see `read_file`.
        ValueError: it is not JSON, or nested too deeply.
    """
    raw = read_file(path, max_bytes)
    return parse(raw.decode(json.detect_encoding(raw)).encode("utf-8", "surrogatepass"), is_strict=False)
