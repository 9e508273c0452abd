"""Bytes of blocks that are on their way from a device to the memory of the host."""

from __future__ import annotations

from ctypes import c_ubyte
from typing import Protocol

from torch import Tensor


class ArrivingBytes(Protocol):
    """Bytes of a block on their way to the memory of the host."""

    @property
    def is_ready(self) -> bool:
        """True once they are there."""

    def wait(self) -> Tensor:
        """Return them, uint8 [bytes of the block], once they are there; any thread may call it."""


def bytes_of(data: Tensor) -> memoryview:
    """Return the own bytes of a contiguous tensor; valid as long as the tensor is."""
    return memoryview((c_ubyte * data.nbytes).from_address(data.data_ptr())).cast("B")
