"""A checkpoint's file in memory: mapped, and let go part by part."""

from __future__ import annotations

import mmap
from math import prod

import torch
from torch import Tensor

from quire.models.tensors.stored_tensor import StoredTensor


class MappedFile:
    """The tensors of one file, whose bytes are read when they are looked at."""

    def __init__(self, stored: StoredTensor) -> None:
        with stored.path.open("rb") as file:
            # For writing, because torch warns of tensors that it cannot write to; what is written stays in memory.
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor as it lies in the file, which can change or vanish: copy what is to be kept."""
        count = prod(stored.shape)
        if count == 0:
            return torch.empty(stored.shape, dtype=dtype)
        tensor = torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=stored.offset).view(stored.shape)
        return tensor if stored.offset % dtype.itemsize == 0 else tensor.clone()

    def bytes_of(self, stored: StoredTensor) -> Tensor:
        """Return the bytes of a tensor as they lie in the file, uint8 [num_bytes]."""
        return torch.frombuffer(self._bytes, dtype=torch.uint8, count=stored.num_bytes, offset=stored.offset)

    def let_go(self, stored: StoredTensor) -> None:
        """Have pages that lie in a tensor wholly leave this process; looked at again, they are read again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = -(-stored.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (stored.offset + stored.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end:
            self._bytes.madvise(mmap.MADV_DONTNEED, first, end - first)
