"""The file of a durable prefix cache: records under keys, in LMDB.

LMDB never overwrites pages of a committed state, so a killed process leaves the last committed state. A commit syncs
the data pages, and leaves the meta page to the next commit: when the machine crashes, the last commit may be lost, but
nothing is torn. The file is read through a mapping, where a damaged structure or a truncated file would kill the
process. So its structure is verified before it is opened, and its length before each use.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from struct import Struct
from types import ModuleType
from typing import NamedTuple

from quire.errors import ConfigError

logger = logging.getLogger(__name__)

RECORDS, USES = b"records", b"uses"
_USE = Struct("<QQ")


class StoreFull(Exception):
    """A write that found no room, or that the system refused; nothing was written."""


class StoreDamaged(Exception):
    """A file that can no longer be used."""


class Use(NamedTuple):
    """The last use of a record, and its size.

    Args:
        moment: logical time of the last use; rises with every use.
        num_bytes: size on disk.
    """

    moment: int
    num_bytes: int


class StoreFile:
    """An LMDB file with two tables: records, and the last use of each.

    One thread writes; all threads may read meanwhile.

    Args:
        path: path of the file; a damaged file is renamed to `.damaged`, and a file larger than `max_bytes` is removed.
        max_bytes: largest size of the file.

    Attributes:
        was_damaged: True where a damaged file was renamed.
        uses: uses of all records when the file was opened.

    Raises:
        ConfigError: LMDB is not installed, or the file cannot be made.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._lmdb = _import_lmdb()
        self._path = path
        self.was_damaged = False
        if path.exists() and path.stat().st_size > max_bytes:
            logger.warning("%s is larger than %d bytes: the prefix cache begins anew", path, max_bytes)
            path.unlink()
        problem = _problem(path)
        if problem is None:
            problem = self._open(max_bytes)
        if problem is not None:
            self.was_damaged = True
            aside = path.with_name(path.name + ".damaged")
            logger.warning("%s is damaged (%s): set aside as %s, the prefix cache begins anew", path, problem, aside)
            path.replace(aside)
            problem = self._open(max_bytes)
            if problem is not None:
                raise ConfigError(f"prefix_cache_dir: {path} cannot be made: {problem}", field="prefix_cache_dir")

    def _open(self, max_bytes: int) -> str | None:
        """Open the file and read the uses of its records; return an error message, None on success."""
        lmdb = self._lmdb
        try:
            self._env = lmdb.open(
                str(self._path), subdir=False, map_size=max_bytes, max_dbs=2, metasync=False, mode=0o600
            )
            self._records, self._uses = self._env.open_db(RECORDS), self._env.open_db(USES)
            with self._env.begin(db=self._uses) as txn:
                self.uses = {key: Use(*_USE.unpack(value)) for key, value in txn.cursor()}
        except (lmdb.Error, ValueError, ArithmeticError) as error:
            return str(error)
        except Exception as error:  # struct.error has no narrower base class
            return str(error)
        self._file = os.open(self._path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._num_bytes = os.fstat(self._file).st_size
        return None

    def read(self, key: bytes, take: Callable[[memoryview], bool]) -> bool:
        """Pass a record to `take`, and return its result; False where there is no record.

        Raises:
            StoreDamaged: the file can no longer be used.
        """
        self._check_length()
        try:
            with self._env.begin(db=self._records, buffers=True) as txn:
                record = txn.get(key)
                return record is not None and take(record)
        except self._lmdb.Error as error:
            raise StoreDamaged(str(error)) from error

    def write(self, deleted: Iterable[bytes], records: Mapping[bytes, bytearray], uses: Mapping[bytes, Use]) -> None:
        """Delete records, add records, and write uses, in one transaction.

        Args:
            deleted: keys of records to delete; keys without a record are ignored.
            records: new records; `uses` has their uses.
            uses: uses of new and of existing records.

        Raises:
            StoreFull: nothing was written.
            StoreDamaged: the file can no longer be used.
        """
        self._check_length()
        lmdb = self._lmdb
        try:
            with self._env.begin(write=True) as txn:
                for key in deleted:
                    txn.delete(key, db=self._records)
                    txn.delete(key, db=self._uses)
                for key, record in records.items():
                    txn.put(key, record, db=self._records)
                for key, use in uses.items():
                    txn.put(key, _USE.pack(*use), db=self._uses)
        except (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError) as error:
            raise StoreDamaged(str(error)) from error
        except lmdb.Error as error:
            raise StoreFull(str(error)) from error
        self._num_bytes = os.fstat(self._file).st_size

    def close(self) -> None:
        """Sync the file to disk, and close it."""
        try:
            self._env.sync(True)
        except self._lmdb.Error as error:
            logger.warning("%s may have lost its last records: %s", self._path, error)
        self._env.close()
        os.close(self._file)

    def _check_length(self) -> None:
        # The known length is read first: the writer's thread may enlarge both in between.
        least = self._num_bytes
        if os.fstat(self._file).st_size < least:
            raise StoreDamaged(f"it was cut off below {least} bytes")


def bytes_on_disk(record: bytearray) -> int:
    """Return the size of a record in pages of 4096 bytes, its part of the tables included."""
    return -(-(len(record) + 16) // 4096) * 4096 + 256


def _import_lmdb() -> ModuleType:
    try:
        return import_module("lmdb")
    except ImportError as error:
        raise ConfigError(
            f"prefix_cache_dir needs the package lmdb ({error}): pip install 'quire[disk]'", field="prefix_cache_dir"
        ) from error


def _problem(path: Path) -> str | None:
    """Return the error of a file's structure, None where it is sound or missing."""
    if not path.exists():
        return None
    verifier = import_module("lmdb.verify")
    try:
        found = verifier.verify(str(path), subdir=False)
    except (verifier.VerifyError, OSError) as error:
        return str(error)
    return str(found[0]) if found else None
