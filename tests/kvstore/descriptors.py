"""A process without descriptors: what a limit of open files does when it is reached."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def free_descriptors(count: int = 0, pid: int = 0) -> Iterator[None]:
    """Have a process get only so many further descriptors; those that it has stay open.

    Args:
        count: number of descriptors that it can still get.
        pid: id of the process; 0 for this one.
    """
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # The directory itself is open while it is listed, and closed then.
    used = {int(name) for name in os.listdir(f"/proc/{pid or 'self'}/fd")}
    free = (number for number in range(len(used) + count + 2) if number not in used or not _is_open(pid, number))
    limit = next(number for idx, number in enumerate(free) if idx == count)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def _is_open(pid: int, number: int) -> bool:
    return os.path.lexists(f"/proc/{pid or 'self'}/fd/{number}")
