"""Locks on files that end with the process."""

from __future__ import annotations

import sys


def lock_file(file: int) -> bool:
    """Lock a file until it is closed; return False where another process, or another open file, has the lock.

    Args:
        file: descriptor of a file that is open for writing.

    Raises:
        OSError: the file system has no locks.
    """
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
