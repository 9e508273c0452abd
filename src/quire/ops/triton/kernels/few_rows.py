"""Products of one or two rows with a plain weight, which is read once, as fast as memory gives it.

A program has some columns of the output and reads their rows of the weight from beginning to end. There is nothing to
reuse, so no tensor cores: every thread multiplies and adds its own inputs, and the sums are added up at the end.
"""

import triton
import triton.language as tl

from quire.ops.triton.kernels.numbers import as_stored, rounded
from quire.ops.triton.kernels.overlap import wait_for_previous
from quire.ops.triton.kernels.rows import activated
from quire.ops.triton.launcher import kernel


@triton.jit
def _store_row(
    output, sums, ups, row, columns, num_columns, bias, residual,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Add up the products of a row, add what is to be added, gate, and store."""
    dtype: tl.constexpr = output.dtype.element_ty
    total = tl.sum(sums, 1)
    at = row * num_columns + columns
    added = residual + (at if ACTIVATION < 0 else at + row * num_columns)
    if BIAS:
        total += tl.load(bias + columns).to(tl.float32)
    if RESIDUAL:
        total += tl.load(added).to(tl.float32)
    if ACTIVATION >= 0:
        wide = tl.sum(ups, 1)
        if BIAS:
            wide += tl.load(bias + num_columns + columns).to(tl.float32)
        if RESIDUAL:
            wide += tl.load(added + num_columns).to(tl.float32)
        # With the roundings of a product that is stored before it is gated.
        total = activated(as_stored(total, dtype), as_stored(wide, dtype), ACTIVATION)
    tl.store(output + at, rounded(total, dtype))


@triton.jit
def _add_inputs(
    sums, ups_sums, next_sums, next_ups_sums, rows, stride_row, factors, ups, ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Add the products of some inputs of both rows."""
    values = tl.load(rows).to(tl.float32)
    sums += values * factors.to(tl.float32)
    if ACTIVATION >= 0:
        ups_sums += values * ups.to(tl.float32)
    if ROWS == 2:
        values = tl.load(rows + stride_row).to(tl.float32)
        next_sums += values * factors.to(tl.float32)
        if ACTIVATION >= 0:
            next_ups_sums += values * ups.to(tl.float32)
    return sums, ups_sums, next_sums, next_ups_sums


@kernel
def multiply_few_rows(
    output, x, weight, bias, residual, num_columns, width, stride_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Multiply one or two rows by some columns; with an activation, by their gates and by what these gate.

    `output` [ROWS, num_columns]; `weight` [num_columns, width], `residual` [ROWS, num_columns], both with an activation
    of 2 * num_columns; `num_columns` is a multiple of COLUMNS, and `width` one of INPUTS. Weights, which no kernel
    computes, are loaded while the kernel before still runs.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inputs = tl.arange(0, INPUTS)
    gates = weight + columns.to(tl.int64)[:, None] * width + inputs[None, :]
    ups = gates
    if ACTIVATION >= 0:
        ups = gates + num_columns.to(tl.int64) * width
    # The same addresses for all columns, in the places of the weight's, so that nothing has to change its thread.
    rows = x + (columns * 0)[:, None] + inputs[None, :]
    zeros = tl.zeros([COLUMNS, INPUTS], tl.float32)
    sums, ups_sums, next_sums, next_ups_sums = zeros, zeros, zeros, zeros
    factors = tl.load(gates)
    up_factors = factors
    if ACTIVATION >= 0:
        up_factors = tl.load(ups)
    wait_for_previous(OVERLAPS)
    sums, ups_sums, next_sums, next_ups_sums = _add_inputs(
        sums, ups_sums, next_sums, next_ups_sums, rows, stride_row, factors, up_factors, ROWS, ACTIVATION
    )
    for start in range(INPUTS, width, INPUTS):
        factors = tl.load(gates + start)
        up_factors = factors
        if ACTIVATION >= 0:
            up_factors = tl.load(ups + start)
        sums, ups_sums, next_sums, next_ups_sums = _add_inputs(
            sums, ups_sums, next_sums, next_ups_sums, rows + start, stride_row, factors, up_factors, ROWS, ACTIVATION
        )
    _store_row(output, sums, ups_sums, 0, columns, num_columns, bias, residual, ACTIVATION, BIAS, RESIDUAL)
    if ROWS == 2:
        _store_row(output, next_sums, next_ups_sums, 1, columns, num_columns, bias, residual, ACTIVATION, BIAS,
                   RESIDUAL)  # fmt: skip
