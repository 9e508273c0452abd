"""Low-rank adapters of a linear layer by compiled kernels: one call for all adapters of a step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.lora import LoraRows, LoraWeight
from quire.ops.native_library import TYPES, NativeLibrary


class PackedLora(NamedTuple):
    """An adapter's matrices of a layer, as the kernel reads them.

    Args:
        call: address of A, its number of ranks, address and number of `parts` (`LoraWeight` in lora.cpp).
        parts: five numbers for each part (`LoraPart` in lora.cpp).
        tensors: what they point to.
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
        self._run, self._panel_columns = library.lora, library.lora_columns
        self._num_columns = num_columns
        self._packed: dict[int, PackedLora] = {}
        self._table = array("q")  # address of each slot's structure, 0 for none

    def pack(self, weight: LoraWeight) -> PackedLora:
        """Lay the second matrices out in panels of columns, so that each is read front to back."""
        a, parts = weight.a.contiguous(), array("q")
        tensors = [a]
        for b, first_rank, first_column in weight.parts:
            num_columns, rank = b.shape
            padded = functional.pad(b, (0, 0, 0, -num_columns % self._panel_columns))
            panels = padded.view(-1, self._panel_columns, rank).mT.contiguous()
            parts.extend((panels.data_ptr(), rank, first_rank, first_column, num_columns))
            tensors.append(panels)
        call = array("q", (a.data_ptr(), len(a), parts.buffer_info()[0], len(weight.parts)))
        return PackedLora(call, parts, tuple(tensors))

    def put(self, slot: int, packed: Any | None) -> None:
        """Set the adapter of a slot."""
        self._packed.pop(slot, None)
        if packed is not None:
            self._packed[slot] = packed
        most = max((slot, *self._packed))
        known = (self._packed.get(each) for each in range(most + 1))
        self._table = array("q", (0 if each is None else each.call.buffer_info()[0] for each in known))

    def has(self, slots: Sequence[int]) -> bool:
        """Return whether the adapter of any of the slots has a part in the layer."""
        return not self._packed.keys().isdisjoint(slots)

    def __call__(self, x: Tensor, rows: LoraRows, residual: Tensor | None) -> Tensor:
        """Multiply by the matrices of all adapters in one call."""
        table = self._table
        if max(rows.slots) >= len(table):  # a later slot's adapter has no part here
            table = self._table = array("q", (*table, *(0,) * (max(rows.slots) + 1 - len(table))))
        num_rows, width = x.shape
        output = torch.empty(num_rows, self._num_columns, dtype=x.dtype)
        self._run(
            TYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            num_rows,
            width,
            table.buffer_info()[0],
            rows.call.buffer_info()[0],
            None if residual is None else residual.data_ptr(),
            self._num_columns,
            output.data_ptr(),
        )
        return output
