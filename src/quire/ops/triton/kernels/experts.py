"""Grouped GEMM of routed experts: rows are sorted by expert, and one launch serves the experts of a layer."""

import triton
import triton.language as tl

from quire.ops.triton.kernels.numbers import as_stored, factor, rounded
from quire.ops.triton.launcher import kernel


@triton.jit
def rows_of_tile(tile, tile_rows, tile_ends, row_ids, GATHER: tl.constexpr, ROWS: tl.constexpr):
    """Return the grouped rows of a tile, which of them exist, and their rows of the input: with GATHER, `row_ids`."""
    rows = tl.load(tile_rows + tile) + tl.arange(0, ROWS)
    is_row = rows < tl.load(tile_ends + tile)
    sources = rows
    if GATHER:
        sources = tl.load(row_ids + rows, mask=is_row, other=0)
    return rows, is_row, sources


# The tensors of tiles are views of one buffer at any offset: the compiled variant must not depend on their alignment.
@kernel(do_not_specialize=["tile_experts", "tile_rows", "tile_ends"])
def multiply_by_expert(
    output, x, row_ids, row_scales, weights, biases, tile_experts, tile_rows, tile_ends, num_columns, width,
    stride_row, NUM_EXPERTS: tl.constexpr, GATHER: tl.constexpr, SCALE_INPUT: tl.constexpr,
    SCALE_OUTPUT: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of grouped rows by a tile of output columns of its expert's weight.

    `weights` and `biases` hold a pointer for each expert. Tiles past the last one have an expert id >= NUM_EXPERTS.
    With GATHER, `row_ids` are the rows of `x`; `row_scales` are the routing weights of the grouped rows.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile)
    if expert >= NUM_EXPERTS:
        return
    dtype: tl.constexpr = x.dtype.element_ty
    pointer: tl.constexpr = tl.pointer_type(dtype)
    rows, is_row, sources = rows_of_tile(tile, tile_rows, tile_ends, row_ids, GATHER, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < num_columns
    scales = is_row.to(tl.float32)
    if SCALE_INPUT or SCALE_OUTPUT:
        scales = tl.load(row_scales + rows, mask=is_row, other=0.0)
    # See `is_aligned`: a layer with unaligned weights runs its experts one by one.
    weight = tl.multiple_of(tl.load(weights + expert).to(pointer), 16)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, width, INPUTS):
        inputs = start + tl.arange(0, INPUTS)
        is_input = (inputs < width)[None, :]
        at = sources.to(tl.int64)[:, None] * stride_row + inputs[None, :]
        values = tl.load(x + at, mask=is_row[:, None] & is_input, other=0.0)
        if SCALE_INPUT:
            values = rounded(values.to(tl.float32) * as_stored(scales, dtype)[:, None], dtype)
        where = weight + columns.to(tl.int64)[:, None] * width + inputs[None, :]
        factors = tl.load(where, mask=is_column[:, None] & is_input, other=0.0)
        total = tl.dot(factor(values), tl.trans(factor(factors)), total, input_precision="ieee")
    if BIAS:
        bias = tl.load(biases + expert).to(pointer)
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if SCALE_OUTPUT:
        total = as_stored(total, dtype) * scales[:, None]
    where = output + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(where, rounded(total, output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
