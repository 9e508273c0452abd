"""Linear layers with quantised weights by Triton kernels: stored quantised, or quantised while loading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple

import torch
from torch import Tensor

from quire.ops.interface.quantized_weight import (
    QuantizedRows,
    QuantizedWeight,
    StoredWeight,
    WeightForm,
    chunks,
    dequantize,
    factors_of,
)
from quire.ops.triton.kernels import linear as kernels
from quire.ops.triton.launches import Device

# Columns of a matmul program, elements of a program that adds up split-K partial sums, and groups of inputs that a
# program quantises.
COLUMNS: Final = 64
ADDED: Final = 1024
ROUNDED_GROUPS: Final = 32
# Target number of programs per SM: the inputs are split (split-K) to reach it.
PROGRAMS_PER_PROCESSOR: Final = 2


class PackedCodes(NamedTuple):
    """Some columns of the layer, of one form, laid out for the kernel.

    Args:
        form: form of the codes.
        width: number of inputs K.
        codes: uint8 [K, N], or [K / 2, N] if two codes of four bits share a byte.
        scales: [groups, N]; two-level scales multiplied together in float32, others in their own dtype.
        mins: minima, like `scales`; None without minima.
        zero_points: uint8 [groups, N]; None without zero points.
    """

    form: WeightForm
    width: int
    codes: Tensor
    scales: Tensor
    mins: Tensor | None
    zero_points: Tensor | None

    @property
    def is_paired(self) -> bool:
        """True if two codes share a byte."""
        return self.form.bits == 4

    @property
    def is_float8(self) -> bool:
        """True if codes are e4m3 values: then rows are not quantised."""
        return self.form.levels == "e4m3"

    @property
    def rounded_group(self) -> int | None:
        """Number of inputs of a row that are quantised with one scale; None if rows are not quantised."""
        return None if self.is_float8 else self.form.group

    @property
    def constants(self) -> dict[str, int]:
        """Constexprs of the kernels that read the codes."""
        return {
            "GROUP": self.form.group,
            "PAIRED": self.is_paired,
            "OFFSET": self.form.offset,
            "TABLE": isinstance(self.form.levels, tuple),
            "MINS": self.mins is not None,
            "ZEROS": self.zero_points is not None,
            "FLOAT8": self.is_float8,
        }

    def rows(self, ids: Tensor) -> Tensor:
        """Dequantise rows of the weight (columns of the layer) to float32 [n, K]."""
        codes = self.codes[:, ids]
        if self.is_paired:
            by_pair = codes.view(-1, 1, self.form.group, len(ids))
            codes = torch.cat((by_pair & 15, by_pair >> 4), 1).flatten(0, 2)
        num_groups = self.width // self.form.group
        mins, zero_points = (
            None if part is None else part[:num_groups, ids].T for part in (self.mins, self.zero_points)
        )
        codes = codes[: self.width].T.contiguous()
        return dequantize(self.form, QuantizedRows(codes, self.scales[:num_groups, ids].T, mins, zero_points))


class RoundedRows(NamedTuple):
    """Rows in the form that the kernels take.

    Args:
        x: levels of quantised rows, float16 [T, groups * G], padded with zeros; for e4m3 weights the plain rows.
        scales: float32 [T, groups]; for e4m3 weights any tensor, which is not read.
    """

    x: Tensor
    scales: Tensor


class TritonQuantizedLinear:
    """A linear layer with quantised weights, which are unpacked in the kernel.

    Rows of `x` are quantised to int8 in the groups of each part, except for e4m3 weights. There is no look-up of rows,
    as the weight may have been quantised while it was loaded.

    Args:
        weight: weight without plain parts.
        bias: [out], or None.
        device: device of the weight.
    """

    __slots__ = ("_device", "_dtype", "_tables", "bias", "parts", "rounds_inputs")

    def __init__(self, weight: StoredWeight, bias: Tensor | None, device: Device) -> None:
        self._device, self._dtype, self.bias = device, weight.dtype, bias
        self.rounds_inputs = weight.rounds_inputs
        # Adjacent weights of one form, such as gate and up, are one part: one launch.
        self.parts = [
            pack(tuple(parts), device.torch_device) for _, parts in groupby(weight.quantized, lambda part: part.form)
        ]
        self._tables = {
            part.form.levels: torch.tensor(part.form.levels, dtype=torch.int16, device=device.torch_device)
            for part in self.parts
            if isinstance(part.form.levels, tuple)
        }

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Quantise the rows, multiply, and add bias and residual."""
        rounded = self.round_for_parts(x)
        outputs, start = [], 0
        for part in self.parts:
            columns = slice(start, start + part.codes.shape[1])
            start = columns.stop
            bias = None if self.bias is None else self.bias[columns]
            added = None if residual is None else residual[:, columns].contiguous()
            outputs.append(self._multiply(part, rounded[part.rounded_group], bias, added, x.dtype))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def round_for_parts(self, x: Tensor) -> dict[int | None, RoundedRows]:
        """Return rows [T, in] by the group size of the parts that take them; by None for parts that take plain rows."""
        x = x if x.stride(1) == 1 else x.contiguous()
        rows_by_group: dict[int | None, RoundedRows] = {}
        for group in {part.rounded_group for part in self.parts}:
            if group is None:
                rows_by_group[group] = RoundedRows(x, x)
            else:
                num_groups = max(len(part.scales) for part in self.parts if part.rounded_group == group)
                rows_by_group[group] = round_rows(x, group, num_groups)
        return rows_by_group

    def table_of(self, part: PackedCodes) -> Tensor | None:
        """Return the levels of a part's codes, int16; None if the part has no table of levels."""
        levels = part.form.levels
        return self._tables[levels] if isinstance(levels, tuple) else None

    def _multiply(
        self, part: PackedCodes, rows: RoundedRows, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Return some columns of the output, [T, N]."""
        x, row_scales = rows
        num_rows, num_columns = len(x), part.codes.shape[1]
        output = torch.empty(num_rows, num_columns, dtype=dtype, device=x.device)
        if not num_rows:
            return output
        form = part.form
        num_steps = len(part.codes) // form.group
        tile = 16 if num_rows <= 16 else 64
        grid = -(-num_columns // COLUMNS), -(-num_rows // tile)
        num_parts = count_parts(num_steps, grid[0] * grid[1], self._device.num_processors)
        sums = torch.empty(num_parts, num_rows, num_columns, dtype=torch.float32, device=x.device)
        table = self.table_of(part)
        kernels.multiply[(*grid, num_parts)](
            sums,
            x,
            row_scales,
            part.codes,
            part.scales,
            part.scales if part.mins is None else part.mins,
            part.codes if part.zero_points is None else part.zero_points,
            part.codes if table is None else table,
            num_rows,
            num_columns,
            num_steps // num_parts,
            x.stride(0),
            sums.stride(0),
            **part.constants,
            ROWS=tile,
            COLUMNS=COLUMNS,
        )
        kernels.add_parts[-(-output.numel() // ADDED),](
            output,
            sums,
            sums if bias is None else bias,
            sums if residual is None else residual,
            output.numel(),
            num_columns,
            num_parts,
            BIAS=bias is not None,
            RESIDUAL=residual is not None,
            COLUMNS=ADDED,
        )
        return output


class TritonStoredLinear(TritonQuantizedLinear):
    """A linear layer with a weight that the checkpoint stores quantised, whose rows can be looked up."""

    __slots__ = ()

    def rows(self, ids: Tensor) -> Tensor:
        """Look up rows of the weight: ids [T] to [T, in]."""
        try:
            return self._look_up(ids)
        except IndexError as error:  # a GPU reports it later, by a device-side assert
            end = sum(part.codes.shape[1] for part in self.parts)
            raise IndexError(f"rows are from 0 to {end - 1}, got ids from {ids.min()} to {ids.max()}") from error

    def _look_up(self, ids: Tensor) -> Tensor:
        """Look up rows; an id that is out of range is out of range in one of the parts, and fails there.

        Every part looks up all ids, and rows of other parts are masked out, so that the host does not wait for the ids.
        """
        start, last = 0, len(self.parts) - 1
        output: Tensor | None = None
        for idx, part in enumerate(self.parts):
            count, local = part.codes.shape[1], ids - start
            if idx < last:
                local = local.clamp(max=count - 1)
            local = local.where(local >= 0, 0 if idx else count)
            rows = part.rows(local).to(self._dtype)
            output = rows if output is None else torch.where((ids >= start)[:, None], rows, output)
            start += count
        assert output is not None, "a weight has parts"
        return output


def round_rows(x: Tensor, group: int, num_groups: int) -> RoundedRows:
    """Quantise rows [T, in] to int8 in groups of inputs, padded with zeros to `num_groups` groups."""
    rows = torch.empty(len(x), num_groups * group, dtype=torch.float16, device=x.device)
    scales = torch.empty(len(x), num_groups, dtype=torch.float32, device=x.device)
    if len(x):
        kernels.round_rows[len(x), -(-num_groups // ROUNDED_GROUPS)](
            rows,
            scales,
            x,
            x.shape[1],
            num_groups,
            x.stride(0),
            GROUP=group,
            GROUPS=ROUNDED_GROUPS,
            enable_fp_fusion=False,  # a fused multiply-add would not round the product first: ties would differ
        )
    return RoundedRows(rows, scales)


def count_parts(num_steps: int, num_tiles: int, num_processors: int) -> int:
    """Return the number of splits of the inputs (split-K): a divisor of the steps that gives all SMs work."""
    wanted = max(1, PROGRAMS_PER_PROCESSOR * num_processors // num_tiles)
    return max(parts for parts in range(1, min(wanted, num_steps) + 1) if num_steps % parts == 0)


def pack(weights: Sequence[QuantizedWeight], device: torch.device) -> PackedCodes:
    """Lay out adjacent weights of one form for the kernel, a chunk of rows at a time."""
    form, width = weights[0].form, weights[0].shape[1]
    pieces = [piece for weight in weights for piece in _pieces(weight, device)]
    fields = [None if piece[0] is None else torch.cat(piece, 1) for piece in zip(*pieces, strict=True)]
    codes, scales, mins, zero_points = fields
    assert codes is not None, "a weight has codes"
    assert scales is not None, "a weight has scales"
    packed_form = form._replace(scale="float32") if form.scale == "two_level" else form
    return PackedCodes(packed_form, width, codes, scales, mins, zero_points)


def _pieces(
    weight: QuantizedWeight, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:
    """Yield codes, scales, minima and zero points of some rows, as columns."""
    form, (num_rows, width) = weight.form, weight.shape
    # Pairs of groups share bytes: an odd last group is paired with one of scale 0.
    missing = width // form.group % 2 if form.bits == 4 else 0
    for part in chunks(num_rows, width):
        rows = weight.read(part).apply(lambda field: field.to(device))
        scales, mins = (rows.scales, rows.mins) if form.scale != "two_level" else factors_of(form, rows)
        codes = rows.codes.T
        if form.bits == 4:
            codes = torch.nn.functional.pad(codes, (0, 0, 0, missing * form.group))
            pairs = codes.reshape(-1, 2, form.group, codes.shape[1])
            codes = (pairs[:, 0] | pairs[:, 1] << 4).flatten(0, 1)
        factors = [
            None if values is None else torch.nn.functional.pad(values.T, (0, 0, 0, missing)).contiguous()
            for values in (scales, mins, rows.zero_points)
        ]
        assert factors[0] is not None, "a weight has scales"
        yield codes.contiguous(), factors[0], factors[1], factors[2]
