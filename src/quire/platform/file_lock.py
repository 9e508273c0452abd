"""Locks on files, which are released when the process ends."""

from __future__ import annotations

import sys
import time


def lock_file(file: int, *, shared: bool = False) -> bool:
    """Lock a file until it is closed; return False if another process, or another open file, has the lock.

    A second call for the same descriptor can change the kind of the lock.

    Args:
        file: descriptor of a file that is open for writing.
        shared: True for a lock that others may have at the same time; exclusive on Windows, which has no such locks.

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
    """Lock a file exclusively, by `lock_file`; return False if the lock is not free within `timeout_s`."""
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
