"""Attention work items of captured decode steps on a GPU, written by compiled code on the host (`decode_work.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from quire.ops.cpu.native_functions import typed
from quire.ops.cpu.native_step_work import SplitRuleCall

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class DecodeRowsCall(ctypes.Structure):
    """The rows of a step (`DecodeRows` of the sources)."""

    _fields_ = (
        ("num_real", _INT),
        ("num_rows", _INT),
        ("positions", _POINTER),
        ("firsts", _POINTER),
        ("block_starts", _POINTER),
    )


class DecodeSharingCall(ctypes.Structure):
    """The shared prefixes of rows (`DecodeSharing` of the sources)."""

    _fields_ = (
        ("num_rows", _INT),
        ("rows", _POINTER),
        ("ends", _POINTER),
        ("num_parts", _POINTER),
        ("num_items", _INT),
        ("items", _POINTER),
        ("item_rows", _POINTER),
        ("num_members", _INT),
        ("members", _POINTER),
        ("member_rows", _POINTER),
    )


class DecodeWorkCall(ctypes.Structure):
    """The division of contexts into work items, and the buffers for these (`DecodeWork` of the sources)."""

    _fields_ = (
        ("splits", SplitRuleCall),
        ("max_items", _INT),
        ("max_split", _INT),
        ("max_shared_items", _INT),
        ("max_shared_rows", _INT),
        ("numbers", _POINTER),
        ("shared_items", _POINTER),
        ("shared_rows", _POINTER),
        ("own_firsts", _POINTER),
        ("num_shared", _POINTER),
        ("places", _POINTER),
    )


class DecodeWorkKernels(NamedTuple):
    """The compiled functions.

    Args:
        lay: `quire_lay_decodes` of the sources.
        write: `quire_write_decodes`; it returns False if a step has more work items than the buffers have room for.
    """

    lay: Callable[..., Any]
    write: Callable[..., Any]

    @classmethod
    def of(cls, library: ctypes.CDLL) -> DecodeWorkKernels:
        """Load the functions from a library."""
        rows, sharing, work = map(ctypes.POINTER, (DecodeRowsCall, DecodeSharingCall, DecodeWorkCall))
        return cls(
            typed(library.quire_lay_decodes, _INT, _INT, *(_POINTER,) * 3, *(_INT,) * 4, *(_POINTER,) * 4),
            typed(library.quire_write_decodes, rows, sharing, work, returns=ctypes.c_bool),
        )
