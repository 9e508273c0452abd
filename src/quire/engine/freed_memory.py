"""Memory that the C library keeps for tensors, given back to the system once something else that was large is gone."""

from __future__ import annotations

import ctypes
import sys

from quire.execution.heap import KEPT_BYTES, TRIM_THRESHOLD

# More than what a thread may free without its part of the heap being looked at.
LARGE_BYTES = 1 << 17


def return_freed_memory() -> None:
    """Give back what is free, in all parts of the heap, and at the end of the calling thread's own."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim"):
        return
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    library.free.restype, library.free.argtypes = None, (ctypes.c_void_p,)
    # `malloc_trim` leaves the end of each thread's part alone; what a thread frees looks at it, up to this threshold.
    library.mallopt(TRIM_THRESHOLD, 0)
    library.free(library.malloc(LARGE_BYTES))
    library.malloc_trim(0)
    library.mallopt(TRIM_THRESHOLD, KEPT_BYTES)
