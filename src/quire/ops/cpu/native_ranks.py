"""Collective operations of the ranks of one host, by compiled code in shared memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from quire.ops.cpu.native_functions import typed
from quire.ops.interface.shared_ranks import RankGroupCall

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class RankKernels(NamedTuple):
    """The collective operations of a group; each returns a status, 0 for success, and is called by all ranks.

    Args:
        page_bytes: number of bytes before the slots.
        fail: `quire_fail` of the sources: makes waiting calls of all ranks return.
        all_reduce: `quire_all_reduce`.
        gather: `quire_gather`.
        send: `quire_send`, on rank 0.
        wait: `quire_await`, on the other ranks.
        receive: `quire_receive`, on the other ranks.
    """

    page_bytes: int
    fail: Callable[..., Any]
    all_reduce: Callable[..., Any]
    gather: Callable[..., Any]
    send: Callable[..., Any]
    wait: Callable[..., Any]
    receive: Callable[..., Any]

    @classmethod
    def of(cls, library: ctypes.CDLL) -> RankKernels:
        """Load the functions from a library."""
        group = ctypes.POINTER(RankGroupCall)
        page_bytes = typed(library.quire_page_bytes, returns=_INT)
        return cls(
            int(page_bytes()),
            typed(library.quire_fail, group, _INT),
            typed(library.quire_all_reduce, group, _INT, _POINTER, _POINTER, _INT, _POINTER, returns=_INT),
            typed(library.quire_gather, group, _POINTER, _INT, _POINTER, _POINTER, returns=_INT),
            typed(library.quire_send, group, _POINTER, _INT, returns=_INT),
            typed(library.quire_await, group, _INT, ctypes.POINTER(_INT), returns=_INT),
            typed(library.quire_receive, group, _POINTER, _INT, returns=_INT),
        )
