"""Sums between the ranks of one host in shared memory; see `ops/native/rank_group.h`."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from quire.errors import LockstepDrift, RankFailed
from quire.ops.cpu.native_library import TYPES, NativeLibrary
from quire.ops.interface.shared_ranks import RankGroupCall

# Bytes of a slot: more than the rows of a decode step, and few enough for a slot to stay in the processor's cache.
SLOT_BYTES: Final = 1 << 22
REGION_ALIGNMENT: Final = 1 << 16
MAX_RANKS: Final = 64
# Status of an operation if rank 0 calls another operation than this rank; `DIFFERS - r` for rank r.
DIFFERS: Final = -1 - MAX_RANKS
# Time of polling before a wait sleeps. Ranks with a core each arrive within some microseconds of each other.
SPIN_US: Final = 300
# Time after which `receive` checks that rank 0 is still alive.
LOOK_US: Final = 500_000


def has_shared_memory() -> bool:
    """Return whether this system has anonymous files, which ranks can map."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def region_bytes(page_bytes: int, size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Return the size of a group's memory in bytes, a multiple of any system's page size."""
    return -(-(page_bytes + size * 2 * slot_bytes) // REGION_ALIGNMENT) * REGION_ALIGNMENT


def make_memory(page_bytes: int, size: int, more_bytes: int = 0) -> int:
    """Return the descriptor of new memory for a group of ranks: all zeros, and allocated by the system when written."""
    descriptor = os.memfd_create("quire-ranks", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, region_bytes(page_bytes, size) + more_bytes)
    return descriptor


class SharedMemoryTransport:
    """A rank's part of a group on one host.

    Args:
        library: compiled kernels.
        descriptor: memory of `make_memory`, which stays open.
        rank: number of this rank among all of the model.
        members: numbers of the group's ranks.
        timeout_s: time within which a rank that lives must take part in an operation.
        polls: True where each rank of this host has a core of its own, so that they poll.
        offset: place of the group in the memory, in bytes.
        slot_bytes: bytes of a slot.

    Attributes:
        kernels, call: native functions, and their argument for this group.
    """

    name = "shared memory"

    def __init__(
        self,
        library: NativeLibrary,
        descriptor: int,
        rank: int,
        members: Sequence[int],
        timeout_s: float,
        *,
        polls: bool,
        offset: int = 0,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        self._members = tuple(members)
        self.rank, self.size = self._members.index(rank), len(self._members)
        self.kernels = library.ranks
        length = region_bytes(self.kernels.page_bytes, self.size, slot_bytes)
        self._memory = mmap.mmap(descriptor, length, offset=offset)
        # The buffer keeps the memory mapped.
        self._buffer = (ctypes.c_char * length).from_buffer(self._memory)
        address = ctypes.addressof(self._buffer)
        self.call = RankGroupCall(
            page=address,
            slots=address + self.kernels.page_bytes,
            rank=self.rank,
            size=self.size,
            slot_bytes=slot_bytes,
            turn=0,
            spin_us=SPIN_US if polls else 0,
            timeout_us=int(timeout_s * 1e6),
        )

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `Transport`."""
        pointer = None if residual is None else residual.data_ptr()
        self.check(self.kernels.all_reduce(self.call, TYPES[x.dtype], x.data_ptr(), pointer, x.numel(), x.data_ptr()))
        return x

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """See `Transport`."""
        whole = part.new_empty(len(part), sum(widths)) if self.rank == 0 else None
        num_bytes = (ctypes.c_int64 * self.size)(*(width * part.itemsize for width in widths))
        pointer = None if whole is None else whole.data_ptr()
        self.check(self.kernels.gather(self.call, part.data_ptr(), len(part), num_bytes, pointer))
        return whole

    def send(self, message: bytes) -> None:
        """See `Transport`."""
        self.check(self.kernels.send(self.call, message, len(message)))

    def receive(self) -> Tensor:
        """See `Transport`."""
        length = ctypes.c_int64()
        while True:
            status = self.kernels.wait(self.call, LOOK_US, length)
            if status >= 0 or status <= DIFFERS:  # otherwise rank 0 has sent nothing yet
                break
        self.check(status)
        message = torch.empty(length.value, dtype=torch.uint8)
        self.check(self.kernels.receive(self.call, message.data_ptr(), length.value))
        return message

    def check(self, status: int) -> None:
        """Raise the error of a status."""
        if status > 0:
            raise RankFailed(status - 1, "has ended")
        if status <= DIFFERS:
            other, rank = self._members[DIFFERS - status], self._members[self.rank]
            raise LockstepDrift(
                f"ranks {rank} and {other} exchange different things: they have planned different steps"
            )
        if status < 0:
            late = self._members[-1 - status]
            self.fail(late)
            raise RankFailed(late, f"did not answer within {self.call.timeout_us / 1e6:g} s")

    def fail(self, rank: int) -> None:
        """See `Transport`."""
        self.kernels.fail(self.call, rank)

    def close(self) -> None:
        """Do nothing: the memory is unmapped with this object, since native calls may still use its address."""
