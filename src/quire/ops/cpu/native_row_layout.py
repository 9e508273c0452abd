"""Positions and slots of a step's rows, computed on the host by compiled code (`lay_rows.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from quire.ops.cpu.native_functions import typed

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class RowLayoutKernels(NamedTuple):
    """The compiled functions.

    Args:
        positions: `quire_lay_positions` of the sources.
        slots: `quire_lay_slots`.
    """

    positions: Callable[..., Any]
    slots: Callable[..., Any]

    @classmethod
    def of(cls, library: ctypes.CDLL) -> RowLayoutKernels:
        """Load the functions from a library."""
        return cls(
            typed(library.quire_lay_positions, _INT, *(_POINTER,) * 3),
            typed(library.quire_lay_slots, _INT, *(_POINTER,) * 3, _INT, *(_POINTER,) * 2),
        )
