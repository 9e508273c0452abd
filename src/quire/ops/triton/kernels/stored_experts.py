"""Grouped GEMM of routed experts with quantized weights: rows are sorted by expert, in one launch.

Codes and scales have the layout of `linear.py` here; each expert has its own tensors, of equal format and shape.
"""

import triton.language as tl

from quire.ops.triton.kernels.experts import rows_of_tile
from quire.ops.triton.kernels.linear import add_groups
from quire.ops.triton.kernels.numbers import as_stored, rounded
from quire.ops.triton.launcher import kernel


# The tensors of tiles are views of one buffer at any offset: the compiled variant must not depend on their alignment.
@kernel(do_not_specialize=["tile_experts", "tile_rows", "tile_ends"])
def multiply_stored_by_expert(
    output, x, row_ids, row_scales, row_scores, codes, scales, mins, zeros, biases, table, like_rows, like_scales,
    like_bias, tile_experts, tile_rows, tile_ends, num_columns, num_steps, stride_output, stride_row,
    NUM_EXPERTS: tl.constexpr, GATHER: tl.constexpr, SCORED: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr,
    PAIRED: tl.constexpr, OFFSET: tl.constexpr, TABLE: tl.constexpr, MINS: tl.constexpr, ZEROS: tl.constexpr,
    FLOAT8: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of grouped rows by a tile of output columns of its expert's weight.

    `codes`, `scales`, `mins`, `zeros` and `biases` hold a pointer for each expert; the tensors `like_...` only pass the
    dtypes of the model, the scales and the biases. Tiles past the last one have an expert id >= NUM_EXPERTS. With
    GATHER, `row_ids` are the rows of `x` and of `row_scales`, the scales of quantized rows. With SCORED, the output is
    multiplied by the routing weights `row_scores`.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile)
    if expert >= NUM_EXPERTS:
        return
    number: tl.constexpr = tl.pointer_type(like_scales.dtype.element_ty)
    byte: tl.constexpr = tl.pointer_type(tl.uint8)
    rows, is_row, sources = rows_of_tile(tile, tile_rows, tile_ends, row_ids, GATHER, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < num_columns
    # See `is_aligned`: a layer with unaligned tensors runs its experts one by one.
    own_codes = tl.multiple_of(tl.load(codes + expert).to(byte), 16)
    own_scales = tl.multiple_of(tl.load(scales + expert).to(number), 16)
    own_mins, own_zeros = own_scales, own_codes
    if MINS:
        own_mins = tl.multiple_of(tl.load(mins + expert).to(number), 16)
    if ZEROS:
        own_zeros = tl.multiple_of(tl.load(zeros + expert).to(byte), 16)
    total = add_groups(tl.zeros([ROWS, COLUMNS], tl.float32), x, row_scales, sources, is_row, own_codes, own_scales,
                       own_mins, own_zeros, table, columns, is_column, num_columns, stride_row, 0, num_steps, GROUP,
                       PAIRED, OFFSET, TABLE, MINS, ZEROS, FLOAT8)  # fmt: skip
    if BIAS:
        bias = tl.load(biases + expert).to(tl.pointer_type(like_bias.dtype.element_ty))
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if SCORED:
        # The output of an expert is rounded before it is multiplied by its routing weight.
        scores = tl.load(row_scores + rows, mask=is_row, other=0.0)
        total = as_stored(total, like_rows.dtype.element_ty) * scores[:, None]
    where = output + rows.to(tl.int64)[:, None] * stride_output + columns[None, :]
    tl.store(where, rounded(total, output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
