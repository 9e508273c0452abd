"""Compiled kernels of stored quantised weights."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from quire.ops.quantized_weight import QuantizedRows, QuantizedWeight, StoredWeight, WeightForm, chunks, segments_of
from quire.ops.weight_memory import WeightMemory

# Scales as the libraries number them; there are no kernels for others.
SCALES: Final = {"bfloat16": 0, "float16": 1, "two_level": 2, "float32": 3}


class UnpackedRows(ctypes.Structure):
    """Unpacked rows (`UnpackedRows` in linear_quantized.cpp)."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in QuantizedRows._fields)


class QuantizedKernels(NamedTuple):
    """The kernels of stored quantised weights, for all forms.

    Args:
        form_of: `quire_form_of` of the sources: the number of a form, -1 without a kernel for it.
        num_bytes: `quire_bytes_quantized`.
        pack: `quire_pack_quantized`.
        multiply: `quire_linear_quantized`.
        rows: `quire_rows_quantized`.
        panel_columns: columns of a panel.
    """

    form_of: Callable[..., int]
    num_bytes: Callable[..., int]
    pack: Callable[..., Any]
    multiply: Callable[..., Any]
    rows: Callable[..., Any]
    panel_columns: int

    def number_of(self, form: WeightForm) -> int:
        """Return the number of a form, -1 without a kernel for it."""
        scale = SCALES.get(form.scale, -1)
        levels = 2 if form.levels == "e4m3" else int(form.levels is not None)
        return self.form_of(form.bits, form.group, scale, form.has_mins, form.has_zero_points, levels)

    def pack_weight(self, memory: WeightMemory, weight: StoredWeight, is_gated: bool) -> tuple[Tensor, ...]:
        """Pack a weight without plain parts; that of a gated layer is of one form.

        Returns:
            A tensor with the address of the next (`QuantizedWeight` in linear_quantized.cpp), the segments, and what
            they point to.
        """
        segments = segments_of(weight.quantized)
        table, owned = [], []
        for segment in segments:
            panels = self._pack_segment(memory, segment, is_gated)
            has_levels = isinstance(segment.form.levels, tuple)
            levels = torch.tensor(segment.form.levels if has_levels else [0] * 16, dtype=torch.int8)
            table += [
                self.number_of(segment.form),
                segment.shape[0],
                segment.form.offset,
                levels.data_ptr() if has_levels else 0,
                panels.data_ptr(),
            ]
            owned += [levels, panels]
        entries = torch.tensor(table)
        return torch.tensor([len(segments), entries.data_ptr()]), entries, *owned

    def _pack_segment(self, memory: WeightMemory, segment: QuantizedWeight, is_gated: bool) -> Tensor:
        """Unpack and pack a chunk of panels at a time: the weight is never whole in its unpacked form."""
        (num_columns, width), number = segment.shape, self.number_of(segment.form)
        panels, filled = memory.take(self.num_bytes(number, num_columns, width)), 0
        for part in chunks(num_columns, width, self.panel_columns):
            rows = segment.read(_gated_rows(part, num_columns, self.panel_columns) if is_gated else part)
            rows = rows.apply(Tensor.contiguous)
            pointers = UnpackedRows(*(None if field is None else field.data_ptr() for field in rows))
            count = part.stop - part.start
            self.pack(number, ctypes.byref(pointers), count, width, panels.data_ptr() + filled)
            filled += self.num_bytes(number, count, width)
        return panels


def _gated_rows(part: slice, num_columns: int, panel_columns: int) -> Tensor:
    """Return the rows of some panels of a gated weight: half of a panel's are gates, half what they multiply."""
    half = panel_columns // 2
    columns = torch.arange(part.start, part.stop)
    panel, column = columns // panel_columns, columns % panel_columns
    return panel * half + torch.where(column < half, column, num_columns // 2 + column - half)
