"""The tensors of a checkpoint by the family's names, stored plain or quantised."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from quire.errors import CheckpointError, shown
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.stored_quantization import FLOAT8, TORCH_DTYPES, read_quantization
from quire.models.tensors.dtypes import DTYPES, STORED_DTYPES
from quire.models.tensors.layer_weight import LayerWeight
from quire.models.tensors.stored_tensor import StoredTensor
from quire.ops.interface.quantized_weight import PlainWeight, QuantizedWeight, StoredWeight

WEIGHT: Final = ".weight"
# Suffix of the codes of stacked experts in MXFP4.
BLOCKS: Final = "_blocks"
# Dtypes of tensors that are no weights, such as tables of indices.
INTEGERS: Final = ("I64", "I32", "I8", "U8", "BOOL")


class TensorReader:
    """Reads the tensors of a checkpoint; a file is mapped with the first of its tensors.

    Args:
        checkpoint: the model's files.

    Raises:
        UnsupportedModel: the checkpoint's quantisation method is not supported.
        CheckpointError: a field of its quantization_config is missing or wrong.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._quantization = read_quantization(checkpoint.config, checkpoint.tensors)
        self._files: dict[Path, MappedFile] = {}

    def parts_of(self, name: str) -> tuple[str, ...]:
        """Return the names of the stored tensors that make up a tensor of the family.

        Raises:
            UnsupportedModel: a layer has a quantisation scheme that is not supported.
            CheckpointError: the configuration contradicts the tensors.
        """
        layer = name.removesuffix(WEIGHT)
        suffixes = None
        if self._quantization is not None and (name.endswith(WEIGHT) or self._is_coded(name)):
            suffixes = self._quantization.suffixes(layer)
        return (name,) if suffixes is None else tuple(f"{layer}{suffix}" for suffix in suffixes)

    def shape(self, name: str, wanted_by: str, *, integers: bool = False) -> tuple[int, ...]:
        """Return the shape of a tensor of the family, after the checks that headers allow.

        Args:
            name: name of the tensor.
            wanted_by: the parameter that it is for, for messages.
            integers: the tensor holds integers or flags, and not weights.

        Raises:
            CheckpointError: the tensor is missing, or its dtype is not supported.
        """
        if self.parts_of(name) != (name,):
            return self._layer(name).weight.shape
        stored = self._checkpoint.tensors.get(name)
        if stored is None:
            folder = self._checkpoint.folder
            raise CheckpointError(f"the checkpoint in {folder} has no tensor {shown(name)} (for {wanted_by})")
        supported = INTEGERS if integers else STORED_DTYPES
        if stored.dtype not in supported and stored.decode is None:
            raise CheckpointError(
                f"{stored.path} holds tensor {shown(name)} as {stored.dtype}; {', '.join(supported)} are supported"
            )
        return stored.shape

    def stack_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape [X, out, in] of a quantised tensor of stacked matrices; None for any other tensor."""
        if self.parts_of(name) == (name,):
            return None
        blocks = self._checkpoint.tensors.get(f"{name}{BLOCKS}")
        if blocks is not None:
            return (*blocks.shape[:2], self._layer(name).weight.shape[1])
        stored = self._checkpoint.tensors.get(name)
        return stored.shape if stored is not None and len(stored.shape) == 3 else None

    def read(self, name: str) -> Tensor | LayerWeight:
        """Return a tensor as a view of the mapped file; copy it if it must outlive the mapping."""
        if self.parts_of(name) != (name,):
            return self._layer(name)
        stored = self._checkpoint.tensors[name]
        if stored.dtype in INTEGERS:
            return self._stored(name)
        if stored.decode is None:
            return self._file(stored).tensor(stored, DTYPES[STORED_DTYPES[stored.dtype]])
        values = stored.decode(self._file(stored).bytes_of(stored))
        return LayerWeight(values) if isinstance(values, QuantizedWeight) else values

    def let_go(self, names: Iterable[str]) -> None:
        """Release the pages of tensors from this process."""
        for name in names:
            for part in self.parts_of(name):
                stored = self._checkpoint.tensors[part]
                self._file(stored).let_go(stored)

    def _is_coded(self, name: str) -> bool:
        """Return whether stacked experts, whose names have no suffix, are codes: float8 ones, or blocks of MXFP4."""
        stored = self._checkpoint.tensors.get(name)
        return f"{name}{BLOCKS}" in self._checkpoint.tensors or (stored is not None and stored.dtype in FLOAT8)

    def _layer(self, name: str) -> LayerWeight:
        assert self._quantization is not None
        return self._quantization.weight(name.removesuffix(WEIGHT), self._stored)

    def _stored(self, name: str) -> Tensor:
        stored = self._checkpoint.tensors[name]
        return self._file(stored).tensor(stored, TORCH_DTYPES[stored.dtype])

    def _file(self, stored: StoredTensor) -> MappedFile:
        if stored.path not in self._files:
            try:
                self._files[stored.path] = MappedFile(stored)
            except OSError as error:
                raise CheckpointError(f"{stored.path} cannot be read: {error.strerror}") from error
        return self._files[stored.path]


def join_parts(
    parts: Sequence[Tensor | LayerWeight], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor | StoredWeight:
    """Concatenate on dimension 0; quantised parts are dequantised if their input orders differ."""
    orders = [part.input_order if isinstance(part, LayerWeight) else None for part in parts]
    is_stored = any(isinstance(part, LayerWeight) for part in parts)
    if is_stored and all(_is_same(orders[0], order) for order in orders):
        stored = (part.weight if isinstance(part, LayerWeight) else PlainWeight(part.to(dtype)) for part in parts)
        return StoredWeight(tuple(stored), dtype, orders[0])
    tensors = [
        StoredWeight((part.weight,), dtype, part.input_order).dequantize() if isinstance(part, LayerWeight) else part
        for part in parts
    ]
    if len(tensors) == 1 and tensors[0].dtype == dtype:
        return tensors[0]
    joined = torch.empty(shape, dtype=dtype)  # filled and cast in one pass
    start = 0
    for tensor in tensors:
        joined[start : start + tensor.shape[0]].copy_(tensor)
        start += tensor.shape[0]
    return joined


def _is_same(first: Tensor | None, other: Tensor | None) -> bool:
    return first is other if first is None or other is None else torch.equal(first, other)


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
