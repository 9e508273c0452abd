"""LoRA adapters of a linear layer by native kernels: one call for all adapters of a step."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.cpu.native_library import TYPES, NativeLibrary
from quire.ops.cpu.native_structures import LinearCall
from quire.ops.interface.adapted_linear import StepAdapters
from quire.ops.interface.lora import LoraRows, LoraWeight
from quire.ops.interface.weight_memory import WeightMemory


class PackedLora(NamedTuple):
    """The matrices of an adapter for one layer, in the layout that the kernel reads.

    Args:
        call: address of A, its padded rank, address and number of `parts` (`LoraWeight` in lora.h).
        parts: five numbers for each part (`LoraPart` in lora.h).
        matrices: all matrices, concatenated.
    """

    call: array[int]
    parts: array[int]
    matrices: Tensor


class NativeLoraLayer:
    """The adapters of one linear layer."""

    def __init__(self, library: NativeLibrary, num_columns: int) -> None:
        self._run, self._library = library.lora, library
        self._num_columns = num_columns
        self._packed: dict[int, PackedLora] = {}
        self._weights = array("q")  # address of each slot's structure, 0 for none
        # Address and length of that array (`LoraTable` in lora.h); the address of this one does not change.
        self._table = array("q", (0, 0))
        self._fused: array[int] | None = None

    @property
    def table(self) -> int:
        """Address of the adapters of all slots; it is valid as long as this object lives."""
        return self._table.buffer_info()[0]

    def pack(self, weight: LoraWeight, memory: WeightMemory) -> PackedLora:
        """Pack all matrices in the order in which the kernel reads them."""
        num_across, panel_columns = self._library.lora_ranks, self._library.lora_columns
        vector_values, step_values = self._values(weight.a.dtype)
        laid_out = [_in_groups(weight.a, num_across, vector_values)]
        laid_out += [_in_groups(part.b, panel_columns, step_values) for part in weight.parts]
        matrices = memory.take(sum(matrix.nbytes for matrix in laid_out)).view(weight.a.dtype)
        torch.cat([matrix.flatten() for matrix in laid_out], out=matrices)
        addresses = [*accumulate((matrix.nbytes for matrix in laid_out), initial=matrices.data_ptr())]
        parts = array("q")
        for (b, first_rank, first_column), address in zip(weight.parts, addresses[1:-1], strict=True):
            num_columns, rank = b.shape
            parts.extend((address, rank, first_rank, first_column, num_columns))
        num_ranks = len(laid_out[0]) * num_across
        call = array("q", (addresses[0], num_ranks, parts.buffer_info()[0], len(weight.parts)))
        return PackedLora(call, parts, matrices)

    def _values(self, dtype: torch.dtype) -> tuple[int, int]:
        """Return the number of values in a vector of A, and in a step over the ranks of B."""
        numbers = array("q", (0, 0))
        start = numbers.buffer_info()[0]
        self._library.lora_values(TYPES[dtype], start, start + numbers.itemsize)
        return numbers[0], numbers[1]

    def put(self, slot: int, packed: Any | None) -> None:
        """Set the adapter of a slot."""
        self._packed.pop(slot, None)
        if packed is not None:
            self._packed[slot] = packed
        # In place, since the experts of a layer have many slots, which are set one after the other.
        self._weights.extend([0] * (slot + 1 - len(self._weights)))
        self._weights[slot] = 0 if packed is None else packed.call.buffer_info()[0]
        self._table[0], self._table[1] = self._weights.buffer_info()

    def as_call(self, linear: LinearCall, step: StepAdapters) -> LinearCall:
        """Return a linear layer's structure with these adapters for fused layers; it is valid as long as both live."""
        if self._fused is None:  # several calls may contain the layer
            addresses = (self.table, step.call.buffer_info()[0])
            self._fused = array("q", (*array("q", bytes(linear)), *addresses))  # `AdaptedLinear` in lora.h
        run: Any = self._library.adapted_linear
        kernel = ctypes.cast(run, ctypes.c_void_p)
        return LinearCall(
            kernel, self._fused.buffer_info()[0], linear.num_columns, linear.width, linear.bias, linear.gate
        )

    def has(self, slots: Sequence[int]) -> bool:
        """Return whether any of the slots has an adapter with matrices for this layer."""
        return not self._packed.keys().isdisjoint(slots)

    def __call__(self, x: Tensor, rows: LoraRows, residual: Tensor | None) -> Tensor:
        """Multiply by the matrices of all adapters in one call."""
        num_rows, width = x.shape
        output = torch.empty(num_rows, self._num_columns, dtype=x.dtype)
        self._run(
            TYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            num_rows,
            width,
            self.table,
            rows.call.buffer_info()[0],
            None if residual is None else residual.data_ptr(),
            self._num_columns,
            output.data_ptr(),
        )
        return output


def _in_groups(matrix: Tensor, num_rows: int, num_values: int) -> Tensor:
    """Return [groups of `num_rows` rows, groups of `num_values` values, num_rows, num_values], padded with zeros."""
    rows, width = matrix.shape
    padded = functional.pad(matrix, (0, -width % num_values, 0, -rows % num_rows))
    return padded.view(-1, num_rows, padded.shape[1] // num_values, num_values).transpose(1, 2)
