"""Matmuls with quantized weights: int8 rows times integer weight levels, in groups of inputs that share a scale.

```
 codes        bytes [K, N], one code each; or [K / 2, N], two of four bits each: byte `p * G + i` has input `i` of group
              `2 * p` in its low half, and input `i` of group `2 * p + 1` in its high half
 scales       [K / G, N]
 row_scales   float32 [T, K / G]
```

Quantized rows and the levels of codes are integers that float16 represents exactly, and float32 accumulates their
products exactly, as a group's sum is below 2^24. So one float16 matmul serves all formats; for e4m3 weights, rows are
not quantized and are multiplied in their own dtype.
"""

import triton
import triton.language as tl

from quire.ops.triton.kernels.numbers import factor, from_e4m3, rounded, whole
from quire.ops.triton.launcher import kernel

# Groups whose magnitudes are all below this become zeros; `SMALLEST` of weight_formats.py.
SMALLEST = tl.constexpr(1e-30)


@kernel
def round_rows(output, scales, x, width, num_groups, stride_row, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Quantize GROUPS groups of a row to int8 levels; a group that is not finite gets zeros and a scale of NaN.

    Rows of `x` are padded with zeros: `output` [T, num_groups * GROUP], `scales` [T, num_groups].
    """
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inputs = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + row * stride_row + inputs, mask=inputs < width, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 1)
    poison = tl.sum(values * 0.0, 1)  # 0, or NaN
    usable = (largest >= SMALLEST) & (poison == poison)
    inverse = tl.where(usable, tl.div_rn(127.0, tl.where(usable, largest, 1.0)), 0.0)
    numbers = tl.where(values == values, values, 0.0) * inverse[:, None]
    numbers = tl.where(usable[:, None], whole(tl.where(tl.abs(numbers) < 256.0, numbers, 0.0)), 0.0)
    is_group = groups < num_groups
    tl.store(output + row * num_groups * GROUP + inputs, numbers.to(tl.float16), mask=is_group[:, None])
    own_scales = tl.where(largest < SMALLEST, 0.0, tl.div_rn(largest, 127.0)) + poison
    tl.store(scales + row * num_groups + groups, own_scales, mask=is_group)


@triton.jit
def _levels(codes, table, zeros, OFFSET: tl.constexpr, TABLE: tl.constexpr, ZEROS: tl.constexpr, FLOAT8: tl.constexpr,
            dtype: tl.constexpr):  # fmt: skip
    """Return the levels of codes [G, COLUMNS] as operands of `tl.dot`."""
    if FLOAT8:
        levels = factor(rounded(from_e4m3(codes), dtype))
    elif TABLE:
        levels = tl.load(table + codes.to(tl.int32)).to(tl.float16)
    else:
        whole_levels = codes.to(tl.int16) - OFFSET
        if ZEROS:
            whole_levels -= zeros.to(tl.int16)[None, :]
        levels = whole_levels.to(tl.float16)
    return levels


@triton.jit
def _add_group(
    total, x, row_scales, is_row, codes, group, scales, mins, zeros, table, columns, is_column, num_columns,
    OFFSET: tl.constexpr, TABLE: tl.constexpr, MINS: tl.constexpr, ZEROS: tl.constexpr, FLOAT8: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Accumulate the scaled matmul of one group of inputs: `x` [ROWS, G], `codes` [G, COLUMNS].

    `row_scales` [ROWS] are pointers to the scales of the rows' first groups; they are not read with FLOAT8.
    """
    at = group * num_columns + columns
    zero = at
    if ZEROS:
        zero = tl.load(zeros + at, mask=is_column, other=0)
    levels = _levels(codes, table, zero, OFFSET, TABLE, ZEROS, FLOAT8, dtype)
    products = tl.dot(x, levels, input_precision="ieee")
    factors = tl.load(scales + at, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if not FLOAT8:
        own_scales = tl.load(row_scales + group, mask=is_row, other=0.0)
        factors = factors * own_scales[:, None]
    total += products * factors
    if MINS:
        sums = tl.sum(x.to(tl.float32), 1) * own_scales
        total -= sums[:, None] * tl.load(mins + at, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def add_groups(
    total, x, row_scales, sources, is_row, codes, scales, mins, zeros, table, columns, is_column, num_columns,
    stride_row, first, num_steps, GROUP: tl.constexpr, PAIRED: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr,
    MINS: tl.constexpr, ZEROS: tl.constexpr, FLOAT8: tl.constexpr,
):  # fmt: skip
    """Accumulate the matmul of rows `sources` of `x` and some columns over `num_steps` groups, or pairs of groups."""
    inputs = tl.arange(0, GROUP)
    dtype: tl.constexpr = x.dtype.element_ty
    row_scales += sources.to(tl.int64) * (stride_row // GROUP)
    for step in range(num_steps):
        step_idx = first + step
        where = (step_idx * GROUP + inputs)[:, None].to(tl.int64) * num_columns + columns[None, :]
        packed = tl.load(codes + where, mask=is_column[None, :], other=0)
        group = step_idx * 2 if PAIRED else step_idx
        at = sources.to(tl.int64)[:, None] * stride_row + group * GROUP + inputs[None, :]
        low = factor(tl.load(x + at, mask=is_row[:, None], other=0.0))
        if PAIRED:
            total = _add_group(total, low, row_scales, is_row, packed & 15, group, scales, mins, zeros, table, columns,
                               is_column, num_columns, OFFSET, TABLE, MINS, ZEROS, FLOAT8, dtype)  # fmt: skip
            high = factor(tl.load(x + at + GROUP, mask=is_row[:, None], other=0.0))
            total = _add_group(total, high, row_scales, is_row, packed >> 4, group + 1, scales, mins, zeros, table,
                               columns, is_column, num_columns, OFFSET, TABLE, MINS, ZEROS, FLOAT8, dtype)  # fmt: skip
        else:
            total = _add_group(total, low, row_scales, is_row, packed, group, scales, mins, zeros, table, columns,
                               is_column, num_columns, OFFSET, TABLE, MINS, ZEROS, FLOAT8, dtype)  # fmt: skip
    return total


# Arguments that depend on a step's rows are not specialised on: serving would recompile again and again.
@kernel(do_not_specialize=["num_rows", "num_steps"])
def multiply(
    output, x, row_scales, codes, scales, mins, zeros, table, num_rows, num_columns, num_steps, stride_row,
    stride_part, GROUP: tl.constexpr, PAIRED: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr,
    MINS: tl.constexpr, ZEROS: tl.constexpr, FLOAT8: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows and columns over one split of the inputs (split-K), of `num_steps` groups or pairs."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2).to(tl.int64)
    is_row, is_column = rows < num_rows, columns < num_columns
    total = add_groups(tl.zeros([ROWS, COLUMNS], tl.float32), x, row_scales, rows, is_row, codes, scales, mins, zeros,
                       table, columns, is_column, num_columns, stride_row, part * num_steps, num_steps, GROUP, PAIRED,
                       OFFSET, TABLE, MINS, ZEROS, FLOAT8)  # fmt: skip
    at = part * stride_part + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(output + at, total, mask=is_row[:, None] & is_column[None, :])


@kernel(do_not_specialize=["num_parts"])
def add_parts(
    output, parts, bias, residual, size, num_columns, num_parts, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the split-K partial sums in order, add bias and residual, and round."""
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = at < size
    total = tl.zeros([COLUMNS], tl.float32)
    where = parts + at
    for _ in range(num_parts):
        total += tl.load(where, mask=mask, other=0.0)
        where += size
    if BIAS:
        total += tl.load(bias + at % num_columns, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + at, rounded(total, output.dtype.element_ty), mask=mask)
