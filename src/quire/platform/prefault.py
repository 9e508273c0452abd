"""Pages of the cache, had from the system before a step writes to them, in time that nobody uses.

The system clears a page when it is used for the first time: of a cache that fills, that took 3 to 4 % of a step
(docs/lab/pages-of-the-cache.md). Where the engine rests, a thread asks for the pages that come next: as many bytes as
are in use, 64 MiB at least and 1 GiB at most. So a process that uses little stays small.
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
# What is asked for at once: a step that begins meanwhile shares the processors with no more than that.
PIECE_BYTES: Final = 4 << 20
# The engine rests when it has taken no step for so long.
REST_S: Final = 0.1
# madvise(2), since Linux 5.14; nothing that was written changes.
MADV_POPULATE_WRITE: Final = 23


class Prefaulter:
    """Watches how far a cache is in use, and has pages behind that ready.

    Blocks are handed out from the lowest id on, so what is used next lies behind what was used.

    Args:
        views: [blocks, ...] of each cache group, all of the same memory on the CPU and from its first byte on.
    """

    def __init__(self, views: Sequence[Tensor]) -> None:
        memory = max(views, key=lambda view: view.nbytes)
        self._memory = memory  # is not to be given back before the thread has been told
        self._block_bytes = [view[0].nbytes for view in views]
        self._range = _Range(memory.data_ptr(), memory.nbytes)
        # Also before the interpreter ends, when nobody would come back from the system any more.
        weakref.finalize(self, self._range.close)
        threading.Thread(target=self._range.run, name="quire-prefault", daemon=True).start()

    @classmethod
    def of(cls, views: Sequence[Tensor]) -> Prefaulter | None:
        """Return one where it helps: on Linux, for a cache on the CPU that is not small."""
        is_small = max(view.nbytes for view in views) < LEAST_AHEAD
        return None if sys.platform != "linux" or views[0].device.type != "cpu" or is_small else cls(views)

    @property
    def ready_bytes(self) -> int:
        """Bytes from the first on whose pages were asked for."""
        return self._range.ready

    def begin(self, items: Iterable[ScheduledSequence]) -> None:
        """Say that a step begins, and which blocks come into use."""
        used = self._range.used
        for item in items:
            for delta in item.table_deltas:
                if delta.block_ids:
                    used = max(used, (max(delta.block_ids) + 1) * self._block_bytes[delta.group_idx])
        self._range.used = used
        self._range.is_stepping = True

    def end(self) -> None:
        """Say that a step has ended."""
        self._range.rest()


class _Range:
    """What the thread knows; it keeps no memory alive.

    Args:
        address: of the first byte.
        num_bytes: from there on.

    Attributes:
        used: bytes from the first on that blocks in use may lie in.
        ready: bytes from the first on whose pages were asked for.
        is_stepping: a step is under way.
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
        # Held while pages are asked for: whoever closes this may give the memory back at once. The thread itself may be
        # the one that finds nobody uses the cache any more.
        self._asking = threading.RLock()

    def rest(self) -> None:
        """Note that a step has ended."""
        self.is_stepping = False
        self._rested_s = time.monotonic()
        if self.ready < self._target():
            self._wanted.set()

    def close(self) -> None:
        """Ask for no more pages."""
        with self._asking:
            self._closed.set()
        self._wanted.set()

    def run(self) -> None:
        """Ask for pages whenever some are wanted and nobody steps, until this is closed or the system refuses."""
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
        """Ask for the next piece; False where there is none to be had."""
        # What is in use has its pages.
        start = self._address + max(self.ready, self.used)
        end = min((start // PIECE_BYTES + 1) * PIECE_BYTES, self._address + self._num_bytes)
        first, behind = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        with self._asking:
            if self._closed.is_set():
                return False
            if first < behind and self._madvise(first, behind - first, MADV_POPULATE_WRITE) != 0:
                return False  # an older kernel, or no memory left
        self.ready = end - self._address
        return True
