"""Low-rank adapters of a linear layer by compiled kernels: one call for all adapters of a step."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.adapted_linear import StepAdapters
from quire.ops.lora import LoraRows, LoraWeight
from quire.ops.native_library import TYPES, NativeLibrary
from quire.ops.native_structures import LinearCall


class PackedLora(NamedTuple):
    """An adapter's matrices of a layer, as the kernel reads them.

    Args:
        call: address of A, its number of ranks, address and number of `parts` (`LoraWeight` in lora.cpp).
        parts: five numbers for each part (`LoraPart` in lora.cpp).
        tensors: tensors that they point to.
    """

    call: array[int]
    parts: array[int]
    tensors: tuple[Tensor, ...]


class NativeLoraLayer:
    """The adapters of one linear layer.

    Args:
        library: library of the kernels.
        num_columns: number of outputs of the layer.
    """

    def __init__(self, library: NativeLibrary, num_columns: int) -> None:
        self._run, self._panel_columns, self._values = library.lora, library.lora_columns, library.lora_values
        self._num_columns = num_columns
        self._packed: dict[int, PackedLora] = {}
        self._weights = array("q")  # address of each slot's structure, 0 for none
        # Address and length of that (`LoraTable` in lora.cpp); its own address stays.
        self._table = array("q", (0, 0))
        self._adapted_linear = library.adapted_linear
        self._fused: array[int] | None = None

    def pack(self, weight: LoraWeight) -> PackedLora:
        """Lay the second matrices out in panels of columns, so that each is read front to back."""
        a, parts = weight.a.contiguous(), array("q")
        tensors = [a]
        for b, first_rank, first_column in weight.parts:
            num_columns, rank = b.shape
            values = self._values(TYPES[b.dtype])
            padded = functional.pad(b, (0, -rank % values, 0, -num_columns % self._panel_columns))
            shape = -1, self._panel_columns, padded.shape[1] // values, values
            panels = padded.view(shape).transpose(1, 2).contiguous()
            parts.extend((panels.data_ptr(), rank, first_rank, first_column, num_columns))
            tensors.append(panels)
        call = array("q", (a.data_ptr(), len(a), parts.buffer_info()[0], len(weight.parts)))
        return PackedLora(call, parts, tuple(tensors))

    def put(self, slot: int, packed: Any | None) -> None:
        """Set the adapter of a slot."""
        self._packed.pop(slot, None)
        if packed is not None:
            self._packed[slot] = packed
        known = (self._packed.get(each) for each in range(max(self._packed, default=-1) + 1))
        self._weights = array("q", (0 if each is None else each.call.buffer_info()[0] for each in known))
        self._table[0], self._table[1] = self._weights.buffer_info()

    def as_call(self, linear: LinearCall, step: StepAdapters) -> LinearCall:
        """Return a linear layer with these adapters as fused layers take it; it is valid as long as both live.

        Args:
            linear: the layer without adapters.
            step: adapters of the present step's rows.
        """
        addresses = (self._table.buffer_info()[0], step.cell.buffer_info()[0])
        self._fused = array("q", (*array("q", bytes(linear)), *addresses))  # `AdaptedLinear` in lora.cpp
        run: Any = self._adapted_linear
        kernel = ctypes.cast(run, ctypes.c_void_p)
        return LinearCall(
            kernel, self._fused.buffer_info()[0], linear.num_columns, linear.width, linear.bias, linear.gate
        )

    def has(self, slots: Sequence[int]) -> bool:
        """Return whether the adapter of any of the slots has a part in the layer."""
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
            self._table.buffer_info()[0],
            rows.call.buffer_info()[0],
            None if residual is None else residual.data_ptr(),
            self._num_columns,
            output.data_ptr(),
        )
        return output
