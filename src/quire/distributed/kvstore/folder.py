"""The folder of a durable prefix cache: its locks, and the secret key of its digests.

```
 lock      shared by all engines that use the folder; exclusive while an engine opens the unused folder
 opening   held by one engine at a time, from its first look at the folder until its file is open
 writing   held by one engine at a time, for one transaction
```

The operating system releases the locks of a process that ends, even if it is killed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.errors import ConfigError
from quire.platform.bounded.files import read_file
from quire.platform.file_lock import lock_file, unlock_file, wait_for_lock

logger = logging.getLogger(__name__)

KEY_BYTES = 32
# Another engine may read all weights, and verify the file, while it opens the folder.
OPENING_S = 600.0


class StoreFolder:
    """A folder that this process shares with others until `close`, or until the process ends.

    Only its owner can read its files: they hold prompts and their KV. Until `opened` is called, no other engine can
    open the folder.

    Args:
        path: path of the folder; created if missing.
        opening_s: longest wait for another engine that is opening the folder, in seconds.

    Attributes:
        is_alone: True if no other engine used the folder when this one opened it.
        key: secret key of the digests, random, drawn when the folder was created. Digests must be the same after a
            restart, and clients that can only send requests must not be able to construct one.

    Raises:
        ConfigError: the folder cannot be made or written, another engine is opening it for all of `opening_s`, or
            another engine uses it and the system has no shared locks.
    """

    def __init__(self, path: Path, opening_s: float = OPENING_S) -> None:
        self.path = path
        self._files: dict[str, int] = {}
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in ("lock", "opening", "writing"):
                self._files[name] = os.open(path / name, os.O_RDWR | os.O_CREAT, 0o600)
            self.is_alone = self._take_locks(opening_s)
            self.key = self._read_key() or self._make_key()
        except OSError as error:
            self.close()
            raise _unusable(path, error) from error
        except ConfigError:
            self.close()
            raise

    def opened(self) -> None:
        """Let other engines open the folder from now on."""
        if self.is_alone and self._files:
            lock_file(self._files["lock"], shared=True)
        self._release("opening")

    def abandon(self) -> None:
        """Stop using the folder, so that the next engine that opens it may find it unused."""
        self._release("opening")
        self._release("lock")

    @contextmanager
    def writing(self, timeout_s: float) -> Iterator[bool]:
        """Lock the folder for a transaction; yield False if other engines wrote for all of `timeout_s`."""
        file = self._files["writing"]
        is_locked = wait_for_lock(file, timeout_s)
        try:
            yield is_locked
        finally:
            if is_locked:
                unlock_file(file)

    def close(self) -> None:
        """Release all locks; further calls do nothing."""
        for name in tuple(self._files):
            self._release(name)

    def _release(self, name: str) -> None:
        file = self._files.pop(name, None)
        if file is not None:
            os.close(file)

    def _take_locks(self, opening_s: float) -> bool:
        """Lock the folder for opening and for use; return True if no other engine uses it."""
        if not wait_for_lock(self._files["opening"], opening_s):
            raise ConfigError(
                f"prefix_cache_dir {self.path} was being opened by another engine for {opening_s:g} seconds",
                field="prefix_cache_dir",
            )
        # No other engine takes the exclusive lock meanwhile: it would need the `opening` lock first.
        if lock_file(self._files["lock"]):
            return True
        if not lock_file(self._files["lock"], shared=True):
            raise ConfigError(
                f"prefix_cache_dir {self.path} is in use by another engine, and this system has no shared locks; give "
                "each engine a folder of its own",
                field="prefix_cache_dir",
            )
        return False

    def _read_key(self) -> bytes | None:
        """Return the key; None if it is missing or damaged: then no record in the folder can be hit again."""
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
