"""Memory on huge pages, if the system lets programs choose them (madvise)."""

from __future__ import annotations

import contextlib
import mmap
import sys
from typing import Final

import torch
from torch import Tensor

HUGE_PAGE_BYTES: Final = 2 << 20


def empty_bytes(num_bytes: int) -> Tensor:
    """Return uint8 [num_bytes] that starts at a huge page; a page takes no memory before it is written to.

    Torch reads its own switch for huge pages at a process's first tensor, which is too early for an engine in a program
    that has made tensors before. This function does not depend on the switch.
    """
    if sys.platform != "linux" or not num_bytes:
        return torch.empty(num_bytes, dtype=torch.uint8)
    area = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    first = -torch.frombuffer(area, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
    return torch.frombuffer(area, dtype=torch.uint8, count=num_bytes, offset=first)
