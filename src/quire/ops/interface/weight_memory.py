"""Memory of packed weights."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from quire.platform.huge_pages import empty_bytes

SLAB_BYTES: Final = 256 << 20
LINE_BYTES: Final = 64


class WeightMemory:
    """Allocates weights consecutively from large slabs.

    Huge pages are aligned to their size: in separate allocations, up to half of a weight of a few megabytes would be on
    small pages, and TLB misses would make a matmul of one row 1.2 times as long (measured). A page takes no memory
    before it is written to. A slab lives as long as any weight in it.

    Args:
        slab_bytes: size of a slab, unless a weight is larger.
    """

    def __init__(self, slab_bytes: int = SLAB_BYTES) -> None:
        self._slab_bytes = slab_bytes
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """Return uint8 [num_bytes], aligned to a cache line."""
        start = -(-self._used // LINE_BYTES) * LINE_BYTES
        if start + num_bytes > len(self._slab):
            self._slab, start = empty_bytes(max(num_bytes, self._slab_bytes)), 0
        self._used = start + num_bytes
        return self._slab[start : self._used]
