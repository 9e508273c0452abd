"""Asynchronous copies of blocks from a device to host memory."""

from __future__ import annotations

from ctypes import c_ubyte
from typing import Protocol

from torch import Tensor


class ArrivingBytes(Protocol):
    """An asynchronous copy of a block's bytes to host memory."""

    @property
    def is_ready(self) -> bool:
        """True once the copy is complete."""

    def wait(self) -> Tensor:
        """Wait for the copy and return the bytes, uint8 [bytes of the block]; any thread may call it."""


def bytes_of(data: Tensor) -> memoryview:
    """Return a view of a contiguous tensor's memory, without a copy; valid as long as the tensor is."""
    return memoryview((c_ubyte * data.nbytes).from_address(data.data_ptr())).cast("B")
