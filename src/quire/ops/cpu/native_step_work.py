"""Attention work items of whole steps on a GPU, planned by compiled code on the host (`step_work.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from quire.ops.cpu.native_functions import typed
from quire.ops.cpu.native_structures import StepRows

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class SplitRuleCall(ctypes.Structure):
    """Parameters of split-KV: how contexts are divided into splits (`SplitRule` in work_items.h)."""

    _fields_ = (
        ("tile_tokens", _INT),
        ("num_kv_heads", _INT),
        ("num_programs", _INT),
        ("min_split", _INT),
    )


class SharingRuleCall(ctypes.Structure):
    """Limits from which on a shared prefix is read once (`SharingRule` in shared_prefixes.h)."""

    _fields_ = (
        ("tile_rows", _INT),
        ("unit", _INT),
        ("block_size", _INT),
        ("token_bytes", _INT),
        ("row_bytes", _INT),
        ("least_tokens", _INT),
        ("max_ranges", _INT),
        ("least_bytes", ctypes.c_double),
        ("splits", SplitRuleCall),
    )


class StepCutCall(ctypes.Structure):
    """Tile sizes, attention window and split parameters of a step (`StepCut` of the sources)."""

    _fields_ = (
        ("group", _INT),
        ("decode_rows", _INT),
        ("many_rows", _INT),
        ("window", _INT),
        ("chunk", _INT),
        ("busy_sequences", _INT),
        ("splits", SplitRuleCall),
        ("even", SplitRuleCall),
    )


class StepCountsCall(ctypes.Structure):
    """The number of work items of each kind (`StepCounts` of the sources)."""

    _fields_ = (
        ("num_few", _INT),
        ("num_parts", _INT),
        ("num_many", _INT),
        ("num_split", _INT),
        ("num_places", _INT),
        ("num_shared_items", _INT),
        ("num_shared_rows", _INT),
    )


class SharedDecodeRowsCall(ctypes.Structure):
    """Decode rows that may share prefixes (`SharedDecodeRows` of the sources)."""

    _fields_ = (
        ("num_rows", _INT),
        ("positions", _POINTER),
        ("sees_all", _POINTER),
        ("block_starts", _POINTER),
        ("block_ids", _POINTER),
    )


class FoundSharingCall(ctypes.Structure):
    """The shared ranges that were found, and the inputs of the search (`FoundSharing` of the sources)."""

    _fields_ = (
        ("max_items", _INT),
        ("max_members", _INT),
        ("candidates", _POINTER),
        ("deciding", _POINTER),
        ("rows", _POINTER),
        ("ends", _POINTER),
        ("num_parts", _POINTER),
        ("items", _POINTER),
        ("item_rows", _POINTER),
        ("members", _POINTER),
        ("member_rows", _POINTER),
        ("num_candidates", _INT),
        ("num_sharing", _INT),
        ("num_items", _INT),
        ("num_members", _INT),
    )


class StepWorkKernels(NamedTuple):
    """The compiled functions.

    Args:
        plan: `quire_plan_step` of the sources; it returns the number of values, and writes none if there is no room for
            them.
        share: `quire_share_decodes`; it returns False if there is no room for the shared ranges.
    """

    plan: Callable[..., Any]
    share: Callable[..., Any]

    @classmethod
    def of(cls, library: ctypes.CDLL) -> StepWorkKernels:
        """Load the functions from a library."""
        rule, counts = ctypes.POINTER(SharingRuleCall), ctypes.POINTER(StepCountsCall)
        step = ctypes.POINTER(StepRows), ctypes.POINTER(StepCutCall), rule, _POINTER, _INT, counts
        decodes = ctypes.POINTER(SharedDecodeRowsCall), rule, ctypes.POINTER(FoundSharingCall)
        return cls(
            typed(library.quire_plan_step, *step, returns=_INT),
            typed(library.quire_share_decodes, *decodes, returns=ctypes.c_bool),
        )
