"""The folder of a durable prefix cache: locked by one engine at a time, with the secret key of its digests."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from quire.bounded.files import read_file
from quire.errors import ConfigError
from quire.platform.file_lock import lock_file

logger = logging.getLogger(__name__)

KEY_BYTES = 32


class StoreFolder:
    """A folder that this process locks until `close`, or until the process ends.

    Only its owner can read its files: they hold prompts and their KV.

    Args:
        path: path of the folder; created if missing.

    Attributes:
        key: secret key of the digests, random, drawn when the folder was created. Digests must be the same after a
            restart, and clients that can only send requests must not be able to construct one.

    Raises:
        ConfigError: the folder cannot be made or written, or another engine uses it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            self._take_lock()
            self.key = self._read_key() or self._make_key()
        except OSError as error:
            os.close(self._lock)
            raise _unusable(path, error) from error
        except ConfigError:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Release the lock of the folder."""
        os.close(self._lock)

    def _take_lock(self) -> None:
        if not lock_file(self._lock):
            raise ConfigError(
                f"prefix_cache_dir {self.path} is in use by another engine; give each engine a folder of its own",
                field="prefix_cache_dir",
            )

    def _read_key(self) -> bytes | None:
        """Return the key, None where it is missing or damaged: then no record in the folder can be hit again."""
        path = self.path / "key"
        if not path.exists():
            return None
        key = read_file(path, 1 << 12)
        if len(key) == KEY_BYTES:
            return key
        logger.warning("%s has %d bytes instead of %d: the prefix cache begins anew", path, len(key), KEY_BYTES)
        return None

    def _make_key(self) -> bytes:
        """Draw a key and write it atomically."""
        key, part = os.urandom(KEY_BYTES), self.path / "key.new"
        part.unlink(missing_ok=True)
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        with open(file, "wb") as stream:
            stream.write(key)
            stream.flush()
            os.fsync(file)
        part.replace(self.path / "key")
        return key


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"prefix_cache_dir must be a folder that can be written: {path}: {error.strerror}", field="prefix_cache_dir"
    )
