"""The file of a durable prefix cache, in LMDB: records under keys, and the order of their last uses.

LMDB never overwrites pages of a committed state, so a killed process leaves the last committed state, and others read
one while a process writes. A commit syncs the data pages, and leaves the meta page to the next commit: when the machine
crashes, the last commit may be lost, but nothing is torn. The file is memory-mapped, so reading a damaged structure or
a truncated file would kill the process. Therefore its structure is verified before it is opened, and its length before
each use.

All engines of a folder use one file. They share only its tables, which one transaction changes together: the records,
their total bytes, and the order of their last uses. So the size limit holds for all engines together, and each finds
the records of the others.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from quire.config.extras import importing_extra
from quire.distributed.kvstore.folder import StoreFolder
from quire.distributed.kvstore.lmdb_tables import (
    LIMIT,
    META,
    NUMBER,
    TABLES,
    StoreSizes,
    Transaction,
    find_problem,
)
from quire.distributed.kvstore.sources import Record, WriteBatch, Written
from quire.errors import ConfigError

logger = logging.getLogger(__name__)

NAME = "blocks.mdb"
# Longest wait for another engine's transaction, which normally ends long before.
WRITING_S = 10.0
# Wait for readers before a write is retried: a reader's transaction copies one record.
READING_S = 0.05
# Errors that say nothing about the file: the process has no descriptor or memory for it, or no permission.
NOT_OF_FILE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EACCES, errno.EPERM)


class StoreFull(Exception):
    """The file has no room for a write, or the system refused it; nothing was written."""


class StoreDamaged(Exception):
    """A file that can no longer be used."""


class StoreFile:
    """An LMDB file in a folder.

    One thread of this process writes; meanwhile its other threads may read, and other processes may read and write.
    """

    def __init__(self, folder: StoreFolder, max_bytes: int) -> None:
        self._lmdb = _import_lmdb()
        self._folder = folder
        self._path = path = folder.path / NAME
        self._env: Any = None
        self.was_damaged = False
        if folder.is_alone and path.exists() and path.stat().st_size > max_bytes:
            logger.warning("%s is larger than %d bytes: the prefix cache begins anew", path, max_bytes)
            self._remove()
        problem = self._verify_and_open(max_bytes)
        if problem is not None and not folder.is_alone:
            raise StoreDamaged(problem)
        if problem is not None:
            self.was_damaged = True
            aside = path.with_name(path.name + ".damaged")
            logger.warning("%s is damaged (%s): set aside as %s, the prefix cache begins anew", path, problem, aside)
            path.replace(aside)
            self._remove()
            problem = self._verify_and_open(max_bytes)
            if problem is not None:
                raise ConfigError(f"prefix_cache_dir: {path} cannot be made: {problem}", field="prefix_cache_dir")

    def _remove(self) -> None:
        """Remove the file, and LMDB's file of locks, which belongs to it."""
        for name in (NAME, NAME + "-lock"):
            self._path.with_name(name).unlink(missing_ok=True)

    def _verify_and_open(self, max_bytes: int) -> str | None:
        """Open the file while no engine writes; return the problem of a file that cannot be opened, None on success."""
        with self._folder.writing(WRITING_S) as is_locked:
            if not is_locked:
                raise ConfigError(
                    f"prefix_cache_dir {self._folder.path}: another engine wrote for {WRITING_S:g} seconds; it may be "
                    "stopped",
                    field="prefix_cache_dir",
                )
            problem: str | None = "not opened"
            try:
                problem = _structure_problem(self._path) or self._open(max_bytes)
            except OSError as error:
                raise ConfigError(
                    f"prefix_cache_dir: {self._path} cannot be opened: {error.strerror}", field="prefix_cache_dir"
                ) from error
            finally:
                if problem is not None:
                    self._close_env()
            return problem

    def _open(self, max_bytes: int) -> str | None:
        lmdb = self._lmdb
        try:
            self._env = lmdb.open(
                str(self._path), subdir=False, map_size=max_bytes, max_dbs=len(TABLES), metasync=False, mode=0o600
            )
            self._env.reader_check()
            self._tables = {name: self._env.open_db(name) for name in TABLES}
            with self._env.begin() as txn:
                limit = txn.get(LIMIT, db=self._tables[META])
                # Checked only by the first engine, not again by each engine that joins.
                problem = find_problem(txn, self._tables) if self._folder.is_alone else None
        except lmdb.Error as error:
            if "already open in this process" in str(error):
                raise ConfigError(
                    f"prefix_cache_dir {self._folder.path} is in use by another engine of this process; give each "
                    "engine of a process a folder of its own",
                    field="prefix_cache_dir",
                ) from error
            if getattr(error, "code", None) in NOT_OF_FILE:
                raise OSError(error.code, os.strerror(error.code)) from error
            return str(error) or repr(error)
        except (ValueError, ArithmeticError, struct.error) as error:
            return str(error) or repr(error)
        if problem is not None:
            return problem
        self._agree_on(max_bytes, limit)
        self._file = os.open(self._path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._num_bytes = os.fstat(self._file).st_size
        return None

    def _agree_on(self, max_bytes: int, limit: bytes | None) -> None:
        """Record the largest size of the file; refuse another one while other engines use the file."""
        wanted = NUMBER.pack(max_bytes)
        if limit == wanted:
            return
        if not self._folder.is_alone:
            self._close_env()
            others = "another size" if limit is None or len(limit) != 8 else str(NUMBER.unpack(limit)[0])
            raise ConfigError(
                f"prefix_cache_disk_bytes must be that of the other engines that use {self._folder.path}, {others}; "
                f"got {max_bytes}",
                field="prefix_cache_disk_bytes",
            )
        try:
            with self._env.begin(write=True, db=self._tables[META]) as txn:
                txn.put(LIMIT, wanted)
        except self._lmdb.Error as error:
            logger.warning("%s cannot be written, and not be shared: %s", self._path, error)

    def find(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys that have a record."""
        stored_keys: list[bytes] = []
        self.fetch(keys, lambda key, _: stored_keys.append(key))
        return stored_keys

    def fetch(self, keys: Sequence[bytes], put: Callable[[bytes, Record], None]) -> None:
        """Pass the records that exist to `put`: views, valid until it returns."""
        self._check_length()
        try:
            with self._env.begin(buffers=True) as txn:
                for key in keys:
                    record = txn.get(key, db=self._tables[b"records"])
                    if record is not None:
                        put(key, record)
        except self._lmdb.Error as error:
            raise StoreDamaged(str(error)) from error

    def sizes(self, identity: bytes) -> StoreSizes:
        """Return the numbers of records and bytes."""
        self._check_length()
        try:
            with self._env.begin() as txn:
                return Transaction(txn, self._tables).sizes(identity)
        except (self._lmdb.Error, struct.error) as error:
            raise StoreDamaged(str(error)) from error

    def put(self, batch: WriteBatch) -> Written:
        """Make the changes of a batch, in one transaction."""
        self._check_length()
        try:
            written = self._write(batch)
        except self._lmdb.Error:
            # LMDB does not reuse pages that a reader holds; `reader_check` releases pages of killed readers.
            self._env.reader_check()
            time.sleep(READING_S)
            try:
                written = self._write(batch)
            except self._lmdb.Error as error:
                raise StoreFull(str(error)) from error
        self._num_bytes = os.fstat(self._file).st_size
        return written

    def _write(self, batch: WriteBatch) -> Written:
        lmdb = self._lmdb
        with self._folder.writing(WRITING_S) as is_locked:
            if not is_locked:
                raise TimeoutError(f"other engines wrote for {WRITING_S:g} seconds")
            try:
                with self._env.begin(write=True) as txn:
                    return Transaction(txn, self._tables).apply(batch)
            except (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError, struct.error) as error:
                raise StoreDamaged(str(error)) from error

    def close(self, *, is_sound: bool = True) -> None:
        """Sync the file to disk if it is sound, and close it."""
        try:
            if is_sound:
                self._env.sync(True)
        except self._lmdb.Error as error:
            logger.warning("%s may have lost its last records: %s", self._path, error)
        self._close_env()
        os.close(self._file)

    def _close_env(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _check_length(self) -> None:
        # The known length is read first: writers may enlarge both in between.
        least = self._num_bytes
        if os.fstat(self._file).st_size < least:
            raise StoreDamaged(f"it was cut off below {least} bytes")


def _import_lmdb() -> ModuleType:
    with importing_extra("prefix_cache_dir"):
        return import_module("lmdb")


def _structure_problem(path: Path) -> str | None:
    """Return the error of a file's structure; None if it is sound or missing; raise an error that is not the file's."""
    if not path.exists():
        return None
    verifier = import_module("lmdb.verify")
    try:
        problems = verifier.verify(str(path), subdir=False)
    except (verifier.VerifyError, OSError) as error:
        if isinstance(error, OSError) and error.errno in NOT_OF_FILE:
            raise
        return str(error) or repr(error)
    return str(problems[0]) if problems else None
