"""Native kernels for stored quantised weights."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from quire.ops.interface.quantized_weight import QuantizedRows, QuantizedWeight, StoredWeight, WeightForm, chunks
from quire.ops.interface.weight_memory import WeightMemory

# The libraries' numbers of scale dtypes; there are no kernels for others.
SCALES: Final = {"bfloat16": 0, "float16": 1, "two_level": 2, "float32": 3}

# Number of fields of a segment.
SEGMENT_FIELDS: Final = 5


class UnpackedRows(ctypes.Structure):
    """Unpacked rows (`UnpackedRows` in gguf_blocks.h)."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in QuantizedRows._fields)


class BlockRows(ctypes.Structure):
    """Rows of blocks of a GGUF file (`BlockRows` in gguf_blocks.h)."""

    _fields_ = (
        ("type_id", ctypes.c_int64),
        ("blocks", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("index", ctypes.c_void_p),
    )


class QuantizedKernels(NamedTuple):
    """The kernels for stored quantised weights, for all forms.

    Args:
        form_of: `quire_form_of` of the sources: number of a form, -1 if there is no kernel for it.
        num_bytes: `quire_bytes_quantized`.
        pack: `quire_pack_quantized`.
        pack_blocks: `quire_pack_blocks`; it returns False for block types that it does not unpack.
        pack_rounded: `quire_pack_rounded`, which quantises a plain weight.
        multiply: `quire_linear_quantized`.
        rows: `quire_rows_quantized`.
        panel_columns: columns of a panel.
    """

    form_of: Callable[..., int]
    num_bytes: Callable[..., int]
    pack: Callable[..., Any]
    pack_blocks: Callable[..., bool]
    pack_rounded: Callable[..., bool]
    multiply: Callable[..., Any]
    rows: Callable[..., Any]
    panel_columns: int

    def number_of(self, form: WeightForm) -> int:
        """Return the number of a form, -1 if there is no kernel for it."""
        scale = SCALES.get(form.scale, -1)
        levels = 2 if form.levels == "e4m3" else int(form.levels is not None)
        return self.form_of(form.bits, form.group, scale, form.has_mins, form.has_zero_points, levels)

    def pack_weight(
        self, memory: WeightMemory, weight: StoredWeight, is_gated: bool, num_slices: int = 1
    ) -> tuple[Tensor, ...]:
        """Pack a weight without unquantised parts; the weight of a gated layer has one form."""
        table, owned = [], []
        for form, group in groupby(weight.quantized, key=lambda part: part.form):
            segment = tuple(group)
            panels = self._pack_segment(memory, segment, is_gated)
            has_levels = isinstance(form.levels, tuple)
            levels = torch.tensor(form.levels if has_levels else [0] * 16, dtype=torch.int8)
            num_columns = sum(part.shape[0] for part in segment)
            table += self._segment(form, num_columns, panels, levels if has_levels else None)
            owned += [levels, panels]
        return *_table_of(table, num_slices), *owned

    def round_weight(
        self,
        memory: WeightMemory,
        weight: Tensor,
        type_id: int,
        form: WeightForm,
        is_gated: bool,
        num_slices: int = 1,
    ) -> tuple[Tensor, ...]:
        """Quantise and pack a contiguous plain weight; see `pack_weight`."""
        number = self.number_of(form)
        panels = memory.take(self.num_bytes(number, *weight.shape))
        is_packed = self.pack_rounded(number, type_id, weight.data_ptr(), *weight.shape, is_gated, panels.data_ptr())
        assert is_packed, f"weights cannot be rounded to {form}"
        return *_table_of(self._segment(form, weight.shape[0], panels, None), num_slices), panels

    def _segment(self, form: WeightForm, num_columns: int, panels: Tensor, levels: Tensor | None) -> list[int]:
        """Return the fields of a segment (`Segment` in linear_quantized.cpp)."""
        address = 0 if levels is None else levels.data_ptr()
        return [self.number_of(form), num_columns, form.offset, address, panels.data_ptr()]

    def _pack_segment(self, memory: WeightMemory, parts: Sequence[QuantizedWeight], is_gated: bool) -> Tensor:
        """Pack parts of one form, a range of rows at a time: the whole weight is never unpacked in memory.

        Half of the columns of a panel of a gated weight are gates, the other half the columns that they multiply.
        """
        num_columns, width = sum(part.shape[0] for part in parts), parts[0].shape[1]
        number = self.number_of(parts[0].form)
        panels = memory.take(self.num_bytes(number, num_columns, width))
        half = num_columns // 2 if is_gated else num_columns
        columns = self.panel_columns // 2 if is_gated else self.panel_columns
        start = 0
        for part in parts:
            cuts = (half - start,)

            def destination_of(rows: slice, start: int = start) -> tuple[int, ...]:
                is_second, first = divmod(start + rows.start, half)
                return first, rows.stop - rows.start, width, is_second * columns, columns, panels.data_ptr()

            if not self._pack_blocks(number, part, cuts, destination_of):
                for rows in chunks(part.shape[0], width, cuts=cuts):
                    unpacked = part.read(rows).apply(Tensor.contiguous)
                    pointers = UnpackedRows(*(None if field is None else field.data_ptr() for field in unpacked))
                    self.pack(number, ctypes.byref(pointers), *destination_of(rows))
            start += part.shape[0]
        return panels

    def _pack_blocks(
        self,
        number: int,
        part: QuantizedWeight,
        cuts: tuple[int, ...],
        destination_of: Callable[[slice], tuple[int, ...]],
    ) -> bool:
        """Pack rows directly from blocks; return False if the part has no blocks of a type with a kernel."""
        blocks = part.blocks
        if blocks is None:
            return False
        row_ids = None if blocks.row_ids is None else blocks.row_ids.contiguous()
        for rows in chunks(*part.shape, num_codes=sys.maxsize, cuts=cuts):
            raw = blocks.raw if row_ids is not None else blocks.raw[rows]
            from_rows = BlockRows(
                blocks.type_id, raw.data_ptr(), raw.stride(0), None if row_ids is None else row_ids[rows].data_ptr()
            )
            if not self.pack_blocks(number, ctypes.byref(from_rows), *destination_of(rows)):
                return False
        return True


def _table_of(fields: list[int], num_slices: int) -> tuple[Tensor, Tensor]:
    """Return the fields of a weight, which has the address of its segments, and the segments."""
    entries = torch.tensor(fields)
    return torch.tensor([len(fields) // SEGMENT_FIELDS, entries.data_ptr(), num_slices]), entries
