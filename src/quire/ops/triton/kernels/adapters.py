"""LoRA of rows with different adapters (grouped shrink and expand): two launches for the rows of all adapters.

Rows are grouped by adapter, and a tile has rows of one adapter. The shrink kernel multiplies tiles by matrices A, with
the inputs split (split-K). The expand kernel adds up the partial sums, multiplies by matrices B, and adds the result to
the rows of the output.
"""

import triton
import triton.language as tl

from quire.ops.triton.kernels.numbers import as_stored, factor, rounded
from quire.ops.triton.launcher import kernel

# Fields of an adapter in the table of a layer (int64): pointers to A and B, and the rank.
ENTRY = tl.constexpr(3)
# Rows of B are padded to a multiple of this many values, for vector loads.
PADDED = tl.constexpr(16)


@triton.jit
def _adapter_of_tile(tile, table, tile_entries):
    """Return the entry of a tile's adapter in the table of a layer, and its rank: 0 if it has no part in the layer."""
    entry = table + tl.load(tile_entries + tile).to(tl.int64) * ENTRY
    return entry, tl.load(entry + 2).to(tl.int32)


@triton.jit
def _rows_of_tile(tile, tile_firsts, tile_ends, row_ids, ROWS: tl.constexpr):
    """Return the indices of a tile's grouped rows, which of them exist, and their rows of the step."""
    places = tl.load(tile_firsts + tile) + tl.arange(0, ROWS)
    is_row = places < tl.load(tile_ends + tile)
    return places, is_row, tl.load(row_ids + places, mask=is_row, other=0)


# The stride grows with the number of rows: divisibility by 16 would cause recompilation.
@kernel(do_not_specialize=["stride_part"])
def lora_shrink(
    parts, x, table, tile_entries, tile_firsts, tile_ends, row_ids, width, split_width, stride_row, stride_part,
    max_rank, ROWS: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of rows of `x` [T, width] by one split of the inputs of its adapter's matrix A [R, width].

    `parts` is float32 [splits, grouped rows, max_rank]; `split_width` is a multiple of INPUTS.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    entry, rank = _adapter_of_tile(tile, table, tile_entries)
    if rank == 0:
        return
    dtype: tl.constexpr = x.dtype.element_ty
    pointer: tl.constexpr = tl.pointer_type(dtype)
    matrix = tl.multiple_of(tl.load(entry).to(pointer), 16)
    places, is_row, rows = _rows_of_tile(tile, tile_firsts, tile_ends, row_ids, ROWS)
    first_input = split * split_width
    last_input = tl.minimum(first_input + split_width, width)
    for first_rank in range(0, rank, RANKS):
        ranks = first_rank + tl.arange(0, RANKS)
        is_rank = ranks < rank
        total = tl.zeros([ROWS, RANKS], tl.float32)
        for start in range(first_input, last_input, INPUTS):
            inputs = start + tl.arange(0, INPUTS)
            is_input = (inputs < last_input)[None, :]
            at = rows.to(tl.int64)[:, None] * stride_row + inputs[None, :]
            values = tl.load(x + at, mask=is_row[:, None] & is_input, other=0.0)
            factors = tl.load(matrix + ranks[:, None] * width + inputs[None, :], mask=is_rank[:, None] & is_input,
                              other=0.0)  # fmt: skip
            total = tl.dot(factor(values), tl.trans(factor(factors)), total, input_precision="ieee")
        where = parts + split.to(tl.int64) * stride_part + places.to(tl.int64)[:, None] * max_rank + ranks[None, :]
        tl.store(where, total, mask=is_row[:, None] & is_rank[None, :])


@kernel(do_not_specialize=["stride_part"])
def lora_expand(
    output, parts, table, tile_entries, tile_firsts, tile_ends, row_ids, num_columns, stride_part, max_rank,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply a tile by COLUMNS columns of its adapter's matrix B, and add it to `output` [T, num_columns].

    B is [num_columns, R], each row padded with zeros to a multiple of PADDED.
    """
    tile = tl.program_id(0)
    entry, rank = _adapter_of_tile(tile, table, tile_entries)
    if rank == 0:
        return
    dtype: tl.constexpr = output.dtype.element_ty
    pointer: tl.constexpr = tl.pointer_type(dtype)
    matrix = tl.multiple_of(tl.load(entry + 1).to(pointer), 16)
    places, is_row, rows = _rows_of_tile(tile, tile_firsts, tile_ends, row_ids, ROWS)
    padded_rank = tl.multiple_of((rank + PADDED - 1) // PADDED * PADDED, 16)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < num_columns
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first_rank in range(0, rank, RANKS):
        ranks = first_rank + tl.arange(0, RANKS)
        is_rank = ranks < rank
        mask = is_row[:, None] & is_rank[None, :]
        at = parts + places.to(tl.int64)[:, None] * max_rank + ranks[None, :]
        inner = tl.load(at, mask=mask, other=0.0)
        for split in range(1, SPLITS):
            inner += tl.load(at + split * stride_part, mask=mask, other=0.0)
        factors = tl.load(matrix + columns.to(tl.int64)[:, None] * padded_rank + ranks[None, :],
                          mask=is_column[:, None] & (ranks < padded_rank)[None, :], other=0.0)  # fmt: skip
        # The result of A is rounded to the dtype, as in the reference implementation.
        product = factor(rounded(as_stored(inner, dtype), dtype))
        total = tl.dot(product, tl.trans(factor(factors)), total, input_precision="ieee")
    where = output + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    total += tl.load(where, mask=mask, other=0.0).to(tl.float32)
    tl.store(where, rounded(total, dtype), mask=mask)
