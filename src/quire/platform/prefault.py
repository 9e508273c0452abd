"""Populates pages of the KV cache before a step writes to them, while the engine is idle.

The system clears a page at its first use: for a cache that fills, that took 3 to 4 % of a step
(docs/lab/pages-of-the-cache.md). While the engine is idle, a thread populates the next pages: the number of bytes in
use, at least 64 MiB and at most 1 GiB. So a process that uses little memory stays small.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Final

from torch import Tensor

from quire.scheduling.plan import ScheduledSequence

LEAST_AHEAD: Final = 64 << 20
MOST_AHEAD: Final = 1 << 30
# Bytes of one system call: a step that begins meanwhile shares the processors with no more than that.
PIECE_BYTES: Final = 4 << 20
# Seconds without a step after which the engine counts as idle.
REST_S: Final = 0.1
# madvise(2), since Linux 5.14; contents stay unchanged.
MADV_POPULATE_WRITE: Final = 23


class Prefaulter:
    """Tracks the highest used byte of a cache, and populates the pages after it.

    Blocks are allocated from the lowest id on, so the next pages lie after the used ones.

    Args:
        views: view [blocks, ...] of each cache group, all of one CPU memory and from its first byte on.
    """

    def __init__(self, views: Sequence[Tensor]) -> None:
        memory = max(views, key=lambda view: view.nbytes)
        self._memory = memory  # must not be freed before the thread is stopped
        self._block_bytes = [view[0].nbytes for view in views]
        self._range = _Range(memory.data_ptr(), memory.nbytes)
        # Also before the interpreter exits, when a thread could not return from a system call any more.
        weakref.finalize(self, self._range.close)
        threading.Thread(target=self._range.run, name="quire-prefault", daemon=True).start()

    @classmethod
    def of(cls, views: Sequence[Tensor]) -> Prefaulter | None:
        """Return a prefaulter where it helps: on Linux, for a CPU cache that is not small."""
        is_small = max(view.nbytes for view in views) < LEAST_AHEAD
        return None if sys.platform != "linux" or views[0].device.type != "cpu" or is_small else cls(views)

    @property
    def ready_bytes(self) -> int:
        """Number of leading bytes whose pages were populated."""
        return self._range.ready

    def begin(self, items: Iterable[ScheduledSequence]) -> None:
        """Record the start of a step, and its new blocks."""
        used = self._range.used
        for item in items:
            for delta in item.table_deltas:
                if delta.block_ids:
                    used = max(used, (max(delta.block_ids) + 1) * self._block_bytes[delta.group_idx])
        self._range.used = used
        self._range.is_stepping = True

    def end(self) -> None:
        """Record the end of a step."""
        self._range.rest()


class _Range:
    """The state of the thread; it holds no reference to the memory.

    Args:
        address: address of the first byte.
        num_bytes: size of the memory.

    Attributes:
        used: number of leading bytes that hold all used blocks.
        ready: number of leading bytes whose pages were populated.
        is_stepping: True during a step.
    """

    def __init__(self, address: int, num_bytes: int) -> None:
        self.used = self.ready = 0
        self.is_stepping = False
        self._address, self._num_bytes = address, num_bytes
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._rested_s = time.monotonic()
        self._closed = threading.Event()
        self._wanted = threading.Event()
        self._wanted.set()
        # Held during the system call: the memory may be freed right after `close`. Reentrant, because the finalizer may
        # run in the thread itself.
        self._asking = threading.RLock()

    def rest(self) -> None:
        """Record the end of a step, and wake the thread where pages are missing."""
        self.is_stepping = False
        self._rested_s = time.monotonic()
        if self.ready < self._target():
            self._wanted.set()

    def close(self) -> None:
        """Stop populating pages."""
        with self._asking:
            self._closed.set()
        self._wanted.set()

    def run(self) -> None:
        """Populate pages while the engine is idle, until `close` or until the system refuses."""
        while not self._closed.is_set():
            self._wanted.wait()
            self._wanted.clear()
            while not self._closed.is_set() and self.ready < self._target():
                if self.is_stepping or time.monotonic() - self._rested_s < REST_S:
                    self._closed.wait(REST_S)
                elif not self._ask():
                    return

    def _target(self) -> int:
        return min(self.used + min(max(self.used, LEAST_AHEAD), MOST_AHEAD), self._num_bytes)

    def _ask(self) -> bool:
        """Populate the next piece; return False where the system refuses."""
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
