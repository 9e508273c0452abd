"""Ranks of one host, for native calls that run several layers."""

from __future__ import annotations

import ctypes
from typing import Protocol, runtime_checkable

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class RankGroupCall(ctypes.Structure):
    """A rank's view of its group (`RankGroup` in rank_group.h)."""

    _fields_ = (
        ("page", _POINTER),
        ("slots", _POINTER),
        ("rank", _INT),
        ("size", _INT),
        ("slot_bytes", _INT),
        ("turn", _INT),
        ("spin_us", _INT),
        ("timeout_us", _INT),
    )


@runtime_checkable
class SharedMemoryRanks(Protocol):
    """Ranks of one host, among which native calls all-reduce the outputs of layers.

    Attributes:
        call: structure of the group.
    """

    call: RankGroupCall

    def check(self, status: int) -> None:
        """Raise the error that a call's status stands for."""
