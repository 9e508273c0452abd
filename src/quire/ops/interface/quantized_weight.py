"""The single in-memory form of stored quantised weights: codes of few bits, and scales of groups of inputs.

File formats (GGUF, compressed-tensors, AWQ, GPTQ, MXFP4) are read into this form; kernels know the form and no file
format. The value of a weight is, in float32 and in this order of operations:

```
scale  = scales                    or  super_scales * scales
minimum = mins                     or  super_mins * mins         (0 without)
level  = levels[code]              or  code - offset             (code - zero_point with zero points;
                                                                 the floating-point value of an e4m3 code)
weight = scale * level - minimum
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

# Inputs that share a super-scale.
SUPER_GROUP: Final = 256

ScaleDtype = Literal["float16", "bfloat16", "float32", "two_level"]


class WeightForm(NamedTuple):
    """The static description of a weight's quantisation.

    Args:
        bits: number of bits of a code.
        group: number of inputs that share a scale, 16 or 32; formats with larger groups repeat scales. 128 too for
            e4m3. Activations are quantised to int8 in the same groups.
        scale: dtype of scales; "two_level" for int8 multiples of float16 super-scales, one per 256 inputs.
        has_mins: True if each group has a minimum: of the dtype of the scales, or uint8 multiples of float16
            super-minima.
        has_zero_points: True if each group has a zero point, which is a code.
        levels: values of the codes, integers from -128 to 127; "e4m3" for 8-bit floating-point codes, for which
            activations are not quantised to int8; None for `code - offset`.
        offset: number subtracted from a code; 0 with minima, zero points or levels.
    """

    bits: Literal[4, 5, 6, 8]
    group: Literal[16, 32, 128]
    scale: ScaleDtype
    has_mins: bool = False
    has_zero_points: bool = False
    levels: tuple[int, ...] | Literal["e4m3"] | None = None
    offset: int = 0


class QuantizedRows(NamedTuple):
    """Some rows of a quantised weight, unpacked: N of them, of K inputs, in groups of G.

    Args:
        codes: uint8 [N, K].
        scales: [N, K / G], float16, bfloat16 or float32; int8 for two-level scales.
        mins: [N, K / G], of the same dtype; uint8 for two-level scales; None without minima.
        zero_points: uint8 [N, K / G]; None without zero points.
        super_scales: float16 [N, K / 256]; None without two-level scales.
        super_mins: float16 [N, K / 256]; None without two-level scales or without minima.
    """

    codes: Tensor
    scales: Tensor
    mins: Tensor | None = None
    zero_points: Tensor | None = None
    super_scales: Tensor | None = None
    super_mins: Tensor | None = None

    def at(self, rows: slice | Tensor) -> QuantizedRows:
        """Return a subset of the rows, by index."""
        return self.apply(lambda field: field[rows])

    def columns(self, first: int, end: int) -> QuantizedRows:
        """Return a range of inputs, which consists of whole groups."""
        width = self.codes.shape[1]

        def cut(field: Tensor) -> Tensor:
            group = width // field.shape[1]
            return field[:, first // group : end // group]

        return self.apply(cut)

    def apply(self, function: Callable[[Tensor], Tensor]) -> QuantizedRows:
        """Apply a function to each tensor, and return the results."""
        codes, scales, *others = self
        return QuantizedRows(
            function(codes), function(scales), *(None if other is None else function(other) for other in others)
        )


class StoredBlocks(NamedTuple):
    """The rows of a weight as blocks of a GGUF file, M of them, which a backend may unpack itself.

    Args:
        type_id: number of the block type.
        raw: uint8 [M, bytes of a row], usually a mapped file.
        block_bytes: number of bytes of a block.
        factors: bytes of a block that hold its float16 factors, by which all its values are multiplied; may be none.
        row_ids: int64 [N], index into `raw` of each row of the weight; None for all of them in order.
    """

    type_id: int
    raw: Tensor
    block_bytes: int
    factors: slice
    row_ids: Tensor | None = None

    def factors_of(self, step: int) -> Tensor:
        """Return the factors of every `step`-th row, float16 [n]."""
        rows = self.raw[::step] if self.row_ids is None else self.raw[self.row_ids[::step]]
        blocks = rows.view(len(rows), -1, self.block_bytes)
        return blocks[..., self.factors].flatten().view(torch.float16)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantised weight [N, K] whose rows are unpacked when they are read, usually from a mapped file.

    Args:
        form: form of the weight.
        shape: N, K; K is a multiple of the group size, and of 256 with two-level scales.
        read: function that unpacks rows, given their indices (a slice or int64 [M]), in that order.
        num_bytes: number of bytes of the stored weight.
        blocks: blocks that `read` unpacks, if the weight is in a GGUF file.
    """

    form: WeightForm
    shape: tuple[int, int]
    read: Callable[[slice | Tensor], QuantizedRows]
    num_bytes: int
    blocks: StoredBlocks | None = None

    def rows(self, rows: slice | Tensor) -> QuantizedWeight:
        """Return the weight of a subset of the rows, by index; nothing is read yet."""
        index = torch.arange(self.shape[0])[rows]
        read, blocks = self.read, self.blocks
        num_bytes = self.num_bytes * len(index) // max(1, self.shape[0])
        if blocks is not None:
            blocks = blocks._replace(row_ids=index if blocks.row_ids is None else blocks.row_ids[index])
        return QuantizedWeight(
            self.form, (len(index), self.shape[1]), lambda part: read(index[part]), num_bytes, blocks
        )

    def columns(self, first: int, end: int) -> QuantizedWeight | None:
        """Return the weight of a range of inputs; None if the range does not consist of whole groups."""
        unit = SUPER_GROUP if self.form.scale == "two_level" else self.form.group
        if first % unit or end % unit:
            return None
        num_rows, width = self.shape
        num_bytes, read = self.num_bytes * (end - first) // width, self.read
        return QuantizedWeight(
            self.form, (num_rows, end - first), lambda rows: read(rows).columns(first, end), num_bytes
        )

    def dequantize(self, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return rows as float32 [M, K], with exactly the values that the format defines."""
        return dequantize(self.form, self.read(rows))


class PlainWeight(NamedTuple):
    """A part of a stored weight that is not quantised.

    Args:
        values: [N, K], of the dtype of activations; it may be mapped from a file.
    """

    values: Tensor

    @property
    def form(self) -> None:
        """None: the part is packed as a plain tensor."""
        return None

    @property
    def shape(self) -> tuple[int, int]:
        """N, K."""
        return self.values.shape[0], self.values.shape[1]

    def rows(self, rows: Tensor) -> PlainWeight:
        """Return the weight of a subset of the rows, by their indices int64 [M]."""
        return PlainWeight(self.values[rows])

    def dequantize(self) -> Tensor:
        """Return the values in float32."""
        return self.values.float()


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """The weight of a linear layer as the checkpoint stores it: quantised, possibly in parts of different forms.

    Args:
        parts: weights with the same number of inputs, whose rows are concatenated; some may be unquantised.
        dtype: dtype of activations, and of rows that are looked up.
        input_order: int64 [K], index of the input that each column multiplies; None if columns are in input order.
    """

    parts: tuple[QuantizedWeight | PlainWeight, ...]
    dtype: torch.dtype
    input_order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows (outputs) and of inputs."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def num_forms(self) -> int:
        """Number of different forms of the parts."""
        return len({part.form for part in self.parts})

    @property
    def quantized(self) -> tuple[QuantizedWeight, ...]:
        """The quantised parts; all parts unless `has_plain`."""
        return tuple(part for part in self.parts if isinstance(part, QuantizedWeight))

    @property
    def rounds_inputs(self) -> bool:
        """True if activations are quantised to int8 for all parts."""
        return all(part.form is not None and part.form.levels != "e4m3" for part in self.parts)

    @property
    def has_plain(self) -> bool:
        """True if a part is not quantised."""
        return any(isinstance(part, PlainWeight) for part in self.parts)

    def rows(self, rows: slice | Tensor) -> StoredWeight:
        """Return the weight of a subset of the rows, by index."""
        ends = torch.tensor([part.shape[0] for part in self.parts]).cumsum(0)
        index = torch.arange(int(ends[-1]))[rows].contiguous()
        owners, counts = torch.unique_consecutive(torch.bucketize(index, ends, right=True), return_counts=True)
        parts = [
            self.parts[owner].rows(run - (int(ends[owner]) - self.parts[owner].shape[0]))
            for owner, run in zip(owners.tolist(), torch.split(index, counts.tolist()), strict=True)
        ]
        return StoredWeight(tuple(parts), self.dtype, self.input_order)

    def dequantize(self) -> Tensor:
        """Return the whole weight in the dtype of activations, with columns in input order."""
        whole = torch.cat([part.dequantize().to(self.dtype) for part in self.parts])
        return whole if self.input_order is None else torch.empty_like(whole).index_copy_(1, self.input_order, whole)

    def in_own_order(self) -> StoredWeight:
        """Return the weight for inputs that are in the order of its columns."""
        return StoredWeight(self.parts, self.dtype)


def chunks(num_rows: int, width: int, num_codes: int = 1 << 22, cuts: Sequence[int] = ()) -> Iterator[slice]:
    """Divide rows into ranges of about `num_codes` codes, which are unpacked at a time; no range crosses a cut.

    Ranges have a multiple of 64 rows, which fill whole panels.
    """
    step = max(64, num_codes // width // 64 * 64)
    ends = sorted({*range(0, num_rows, step), *(cut for cut in cuts if 0 < cut < num_rows), num_rows})
    return (slice(first, end) for first, end in pairwise(ends))


def dequantize(form: WeightForm, rows: QuantizedRows) -> Tensor:
    """Return the values of unpacked rows, float32 [N, K]."""
    scales, mins = factors_of(form, rows)
    weights = levels_of(form, rows) * scales[..., None]
    if mins is not None:
        weights = weights - mins[..., None]
    return weights.view(rows.codes.shape)


def levels_of(form: WeightForm, rows: QuantizedRows) -> Tensor:
    """Return the levels of codes, float32 [N, K / G, G]."""
    if form.levels == "e4m3":
        levels = rows.codes.view(torch.float8_e4m3fn).float()
    elif form.levels is not None:
        levels = torch.tensor(form.levels, dtype=torch.float32, device=rows.codes.device)[rows.codes.int()]
    else:
        levels = rows.codes.float() - form.offset
    levels = levels.view(len(levels), levels.shape[1] // form.group, form.group)
    return levels if rows.zero_points is None else levels - rows.zero_points.float()[..., None]


def factors_of(form: WeightForm, rows: QuantizedRows) -> tuple[Tensor, Tensor | None]:
    """Return the scales and the minima of groups, float32 [N, K / G]; None without minima."""
    scales = _of_groups(form, rows.scales, rows.super_scales)
    return scales, None if rows.mins is None else _of_groups(form, rows.mins, rows.super_mins)


def _of_groups(form: WeightForm, factors: Tensor, super_factors: Tensor | None) -> Tensor:
    values = factors.float()
    if super_factors is not None:
        values = super_factors.float().repeat_interleave(SUPER_GROUP // form.group, -1) * values
    return values
