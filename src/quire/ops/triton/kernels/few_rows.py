"""GEMV: matmuls of one or two rows with a plain weight, which is read once, bound by memory bandwidth.

A program has COLUMNS columns of the output and reads their rows of the weight from beginning to end. Nothing is reused,
so tensor cores are not used: each thread accumulates its own inputs, and the sums are reduced at the end.
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
    """Reduce the sums of a row over inputs, add bias and residual, apply the gate, and store."""
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
        # Rounded as if the matmul's result was stored before it is gated.
        total = activated(as_stored(total, dtype), as_stored(wide, dtype), ACTIVATION)
    tl.store(output + at, rounded(total, dtype))


@triton.jit
def _add_inputs(
    sums, ups_sums, next_sums, next_ups_sums, rows, stride_row, factors, ups, ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Accumulate the products of INPUTS inputs, for one or both rows."""
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
    """Multiply one or two rows by COLUMNS columns; with an activation, by their gate and up weights (fused SwiGLU).

    `output` [ROWS, num_columns]; `weight` [num_columns, width], `residual` [ROWS, num_columns], both with an activation
    of 2 * num_columns; `num_columns` is a multiple of COLUMNS, and `width` one of INPUTS. The first weights, which no
    kernel writes, are loaded while the previous kernel still runs.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inputs = tl.arange(0, INPUTS)
    gates = weight + columns.to(tl.int64)[:, None] * width + inputs[None, :]
    ups = gates
    if ACTIVATION >= 0:
        ups = gates + num_columns.to(tl.int64) * width
    # Each column loads the same inputs, in the layout of the weight tile, so that no layout conversion is needed.
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
