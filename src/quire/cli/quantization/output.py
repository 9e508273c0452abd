"""Atomic output of files and folders."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.errors import ConfigError


@contextmanager
def new_output(path: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a temporary path for a new file or folder; move the result to `path` at the end.

    An exception deletes the incomplete output.
    """
    check_new(path)
    try:
        free = shutil.disk_usage(path.parent).free
        if free < num_bytes:
            raise ConfigError(
                f"{path.parent} has {free:,} bytes of free space, and {num_bytes:,} are needed", field="out"
            )
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", field="out") from error
    try:
        yield folder / path.name
        check_new(path)
        (folder / path.name).rename(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", field="out") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_new(path: Path) -> None:
    """Refuse a path that exists, or whose folder does not."""
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists already, and nothing is overwritten: name another path", field="out")
    if not os.path.isdir(path.parent):
        raise ConfigError(f"{path} cannot be written: {path.parent} is no folder", field="out")
