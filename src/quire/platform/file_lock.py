"""Locks on files that end with the process."""

from __future__ import annotations

import sys
import time


def lock_file(file: int, *, shared: bool = False) -> bool:
    """Lock a file until it is closed; return False where another process, or another open file, has the lock.

    A file that is locked already gets the other kind of lock.

    Args:
        file: descriptor of a file that is open for writing.
        shared: True for a lock that others may have at the same time. Windows has none: it is exclusive there.

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
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(file: int, timeout_s: float) -> bool:
    """Lock a file as `lock_file` does, exclusively; return False where others have it for all of `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    while not lock_file(file):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
    return True


def unlock_file(file: int) -> None:
    """Release the lock of a file."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(file, msvcrt.LK_UNLCK, 1)
        return
    import fcntl

    fcntl.flock(file, fcntl.LOCK_UN)
