"""Populates pages of the KV cache before a step writes to them, while the engine is idle.

The system clears a page at its first use, which took 3 to 4 % of a step for a cache that fills
(docs/lab/pages-of-the-cache.md). While the engine is idle, a thread populates the next pages: as many bytes as are in
use, but at least 64 MiB and at most 1 GiB, so a process that uses little memory stays small. A step writes a few
attributes, which the thread reads a few times a second until all pages are populated.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Final

from torch import Tensor

LEAST_AHEAD: Final = 64 << 20
MOST_AHEAD: Final = 1 << 30
# Bytes of one system call, so that a step that begins meanwhile is disturbed only briefly.
PIECE_BYTES: Final = 4 << 20
# Seconds without a step after which the engine counts as idle.
REST_S: Final = 0.2
# madvise(2), since Linux 5.14; contents stay unchanged.
MADV_POPULATE_WRITE: Final = 23


class CacheUse:
    """Use of a cache by the steps so far.

    Attributes:
        highest_blocks: highest block id of each group that was in a block table.
        num_steps: number of steps begun.
        is_stepping: True during a step.
    """

    __slots__ = ("highest_blocks", "is_stepping", "num_steps")

    def __init__(self, num_groups: int) -> None:
        self.highest_blocks = [-1] * num_groups
        self.num_steps = 0
        self.is_stepping = False


class Prefaulter:
    """Populates the pages of a cache after its highest used block.

    Blocks are allocated from the lowest id on, so the next pages are after the used ones.

    Args:
        views: view [blocks, ...] of each cache group; all views are of one CPU buffer, from its first byte on.
        use: use of the cache.
    """

    def __init__(self, views: Sequence[Tensor], use: CacheUse) -> None:
        memory = max(views, key=lambda view: view.nbytes)
        self._memory = memory  # must not be freed before the thread is stopped
        self._range = _Range(memory.data_ptr(), memory.nbytes, [view[0].nbytes for view in views], use)
        # Also before the interpreter exits, when a thread could not return from a system call any more.
        weakref.finalize(self, self._range.close)
        threading.Thread(target=self._range.run, name="quire-prefault", daemon=True).start()

    @classmethod
    def of(cls, views: Sequence[Tensor], use: CacheUse) -> Prefaulter | None:
        """Return a prefaulter on Linux for a CPU cache that is not small, else None."""
        is_small = max(view.nbytes for view in views) < LEAST_AHEAD
        return None if sys.platform != "linux" or views[0].device.type != "cpu" or is_small else cls(views, use)

    @property
    def ready_bytes(self) -> int:
        """Number of leading bytes with populated pages."""
        return self._range.ready


class _Range:
    """The state of the thread; it holds no reference to the memory."""

    def __init__(self, address: int, num_bytes: int, block_bytes: Sequence[int], use: CacheUse) -> None:
        self.ready = 0
        self._address, self._num_bytes = address, num_bytes
        self._block_bytes, self._use = block_bytes, use
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._closed = threading.Event()
        # Held during the system call, because the memory may be freed right after `close`. Reentrant, because the
        # finalizer may run in the thread itself.
        self._asking = threading.RLock()

    @property
    def used(self) -> int:
        """Number of leading bytes up to the end of the last used block."""
        return max((idx + 1) * size for idx, size in zip(self._use.highest_blocks, self._block_bytes, strict=True))

    def close(self) -> None:
        """Stop populating pages."""
        with self._asking:
            self._closed.set()

    def run(self) -> None:
        """Populate pages while the engine is idle, until all are populated, the system refuses, or `close`."""
        use, num_steps = self._use, -1
        while self.ready < self._num_bytes and not self._closed.wait(REST_S):
            # A step since the last look resets the wait.
            num_steps, num_before = use.num_steps, num_steps
            while not use.is_stepping and use.num_steps == num_before and self.ready < self._target():
                if not self._ask():
                    return

    def _target(self) -> int:
        used = self.used
        return min(used + min(max(used, LEAST_AHEAD), MOST_AHEAD), self._num_bytes)

    def _ask(self) -> bool:
        """Populate the next piece; return False if the system refuses, or after `close`."""
        # Used blocks have their pages already.
        start = self._address + max(self.ready, self.used)
        end = min((start // PIECE_BYTES + 1) * PIECE_BYTES, self._address + self._num_bytes)
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        with self._asking:
            if self._closed.is_set():
                return False
            if first < last and self._madvise(first, last - first, MADV_POPULATE_WRITE) != 0:
                return False  # an older kernel, or no memory left
        self.ready = end - self._address
        return True
