"""A checkpoint's file, memory-mapped; pages are released after each tensor."""

from __future__ import annotations

import mmap
from math import prod

import torch
from torch import Tensor

from quire.models.tensors.stored_tensor import StoredTensor


class MappedFile:
    """The tensors of one file, whose bytes are read on access."""

    def __init__(self, stored: StoredTensor) -> None:
        with stored.path.open("rb") as file:
            # Writable, because torch warns about read-only tensors; writes are private to this process.
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        """Return a view of the mapped file (misaligned: a copy), which changes with the file: copy it to keep it."""
        count = prod(stored.shape)
        if count == 0:
            return torch.empty(stored.shape, dtype=dtype)
        tensor = torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=stored.offset).view(stored.shape)
        return tensor if stored.offset % dtype.itemsize == 0 else tensor.clone()

    def bytes_of(self, stored: StoredTensor) -> Tensor:
        """Return a view of a tensor's bytes, uint8 [num_bytes]."""
        return torch.frombuffer(self._bytes, dtype=torch.uint8, count=stored.num_bytes, offset=stored.offset)

    def let_go(self, stored: StoredTensor) -> None:
        """Release the pages that are completely inside a tensor; they are read again on access."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = -(-stored.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (stored.offset + stored.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end:
            self._bytes.madvise(mmap.MADV_DONTNEED, first, end - first)
