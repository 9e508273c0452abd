"""Recurrences over paged states: short convolutions, Mamba 2, the gated delta rule.

A state is updated row by row: one program carries a tile of one head's state of one sequence through the rows. Long
sequences are left to `state_chunks.py` and `delta_chunks.py`. Flags are broadcast to vectors before they are compared:
the interpreter accepts no scalar condition in a mask.
"""

import triton
import triton.language as tl

from quire.ops.triton.kernels.numbers import rounded, sigmoid
from quire.ops.triton.launcher import kernel


@triton.jit
def softplus(x):
    """Return softplus of float32, log1p(exp(x)); as in torch, x itself above 20."""
    small = tl.exp(tl.where(x > 20.0, 0.0, x))
    # log1p: 1 + small is rounded, and the factor small / added corrects the logarithm for that rounding error.
    total = 1.0 + small
    added = tl.where(total == 1.0, 1.0, total - 1.0)
    return tl.where(x > 20.0, x, tl.where(total == 1.0, small, tl.log(total) * (small / added)))


@kernel
def convolve_rows(
    output, x, states, taps, bias, row_sequences, row_starts, block_ids, has_state, num_channels, stride_row,
    stride_block, stride_column, TAPS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute the causal convolution of CHANNELS channels of a row; earlier inputs are read from `x` or the state."""
    row = tl.program_id(0)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channels < num_channels
    sequence = tl.load(row_sequences + row)
    start = tl.load(row_starts + sequence)
    state = states + tl.load(block_ids + sequence).to(tl.int64) * stride_block
    nothing = tl.zeros([CHANNELS], tl.int32)
    is_known = (nothing + tl.load(has_state + sequence)) != 0
    total = tl.zeros([CHANNELS], tl.float32)
    for tap in tl.static_range(TAPS):
        offset = nothing + row - start - (TAPS - 1) + tap
        at = (start + offset).to(tl.int64)
        inputs = tl.load(x + at * stride_row + channels, mask=mask & (offset >= 0), other=0.0)
        column = state + (offset + TAPS - 1) * stride_column
        before = tl.load(column + channels, mask=mask & (offset < 0) & is_known, other=0.0)
        value = tl.where(offset >= 0, inputs.to(tl.float32), before.to(tl.float32))
        total += value * tl.load(taps + tap * num_channels + channels, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias + channels, mask=mask, other=0.0)
    if SILU:
        total *= sigmoid(total)
    dtype: tl.constexpr = output.dtype.element_ty
    tl.store(output + row.to(tl.int64) * num_channels + channels, rounded(total, dtype), mask=mask)


@kernel
def store_inputs(
    x, states, row_starts, block_ids, has_state, num_channels, num_columns, stride_row, stride_block, stride_column,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Update the convolution state: store the last inputs of CHANNELS channels of a sequence, [COLUMNS, CHANNELS]."""
    sequence = tl.program_id(0)
    channels = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    columns = tl.arange(0, COLUMNS)[:, None]
    mask = (channels < num_channels) & (columns < num_columns)
    start, end = tl.load(row_starts + sequence), tl.load(row_starts + sequence + 1)
    state = states + tl.load(block_ids + sequence).to(tl.int64) * stride_block
    is_known = (columns * 0 + tl.load(has_state + sequence)) != 0
    offset = end - start - num_columns + columns
    inputs = tl.load(x + (start + offset).to(tl.int64) * stride_row + channels, mask=mask & (offset >= 0), other=0.0)
    old = state + (offset + num_columns) * stride_column + channels
    before = tl.load(old, mask=mask & (offset < 0) & is_known, other=0.0)
    # All threads must have read the state before it is overwritten.
    tl.debug_barrier()
    tl.store(state + columns * stride_column + channels, tl.where(offset >= 0, inputs, before), mask=mask)


@triton.jit
def scan_rows(
    state, output, x, B, C, dt, A, dt_bias, skips, head, dims, first, num_rows, stride_x, stride_B, stride_C,
    stride_dt, HEADS: tl.constexpr, SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Return some rows (`dims`) of one head's state, [len(dims), WIDTH], after rows of a sequence: Mamba 2."""
    columns = tl.arange(0, WIDTH)
    known_dims, known_columns = dims < HEAD_DIM, columns < STATE_DIM
    decay_rate, bias, skip = tl.load(A + head), tl.load(dt_bias + head), tl.load(skips + head)
    group = head // SHARE * STATE_DIM
    for number in range(num_rows):
        row = first.to(tl.int64) + number
        step = softplus(tl.load(dt + row * stride_dt + head).to(tl.float32) + bias)
        values = tl.load(x + row * stride_x + head * HEAD_DIM + dims, mask=known_dims, other=0.0).to(tl.float32)
        write = tl.load(B + row * stride_B + group + columns, mask=known_columns, other=0.0).to(tl.float32)
        read = tl.load(C + row * stride_C + group + columns, mask=known_columns, other=0.0).to(tl.float32)
        state = state * tl.exp(step * decay_rate) + (values * step)[:, None] * write[None, :]
        row_output = tl.sum(state * read[None, :], 1) + skip * values
        tl.store(output + (row * HEADS + head) * HEAD_DIM + dims, row_output, mask=known_dims)
    return state


@kernel
def scan(
    output, x, B, C, dt, A, dt_bias, skips, states, row_starts, block_ids, has_state, stride_x, stride_B, stride_C,
    stride_dt, stride_block, HEADS: tl.constexpr, SHARE: tl.constexpr, HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, MOST_ROWS: tl.constexpr,
):  # fmt: skip
    """Carry DIM rows of one head's state [HEAD_DIM, STATE_DIM] through a sequence of MOST_ROWS at most: Mamba 2."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(row_starts + sequence)
    num_rows = tl.load(row_starts + sequence + 1) - first
    if num_rows > MOST_ROWS:
        return
    dims = tl.program_id(2) * DIM + tl.arange(0, DIM)
    columns = tl.arange(0, WIDTH)
    mask = (dims < HEAD_DIM)[:, None] & (columns < STATE_DIM)[None, :]
    base = states + tl.load(block_ids + sequence).to(tl.int64) * stride_block
    where = base + (head * HEAD_DIM + dims[:, None]) * STATE_DIM + columns[None, :]
    state = tl.load(where, mask=mask & ((columns[None, :] * 0 + tl.load(has_state + sequence)) != 0), other=0.0)
    state = scan_rows(state, output, x, B, C, dt, A, dt_bias, skips, head, dims, first, num_rows, stride_x, stride_B,
                      stride_C, stride_dt, HEADS, SHARE, HEAD_DIM, STATE_DIM, WIDTH)  # fmt: skip
    tl.store(where, state, mask=mask)


@triton.jit
def correct_rows(
    state, output, q, k, v, g, beta, head, columns, first, num_rows, stride_q, stride_k, stride_v, stride_g,
    stride_beta, HEADS: tl.constexpr, SHARE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Return some columns of one head's state, [KEYS, len(columns)], after rows of a sequence: the gated delta rule."""
    dims = tl.arange(0, KEYS)
    known_dims, known_columns = dims < KEY_DIM, columns < VALUE_DIM
    group = head // SHARE * KEY_DIM
    for number in range(num_rows):
        row = first.to(tl.int64) + number
        query = tl.load(q + row * stride_q + group + dims, mask=known_dims, other=0.0)
        key = tl.load(k + row * stride_k + group + dims, mask=known_dims, other=0.0)
        value = tl.load(v + row * stride_v + head * VALUE_DIM + columns, mask=known_columns, other=0.0)
        state *= tl.exp(tl.load(g + row * stride_g + head))
        expected = tl.sum(key[:, None] * state, 0)
        change = tl.load(beta + row * stride_beta + head) * (value.to(tl.float32) - expected)
        state += key[:, None] * change[None, :]
        tl.store(output + (row * HEADS + head) * VALUE_DIM + columns, tl.sum(query[:, None] * state, 0),
                 mask=known_columns)  # fmt: skip
    return state


@kernel
def delta_rule(
    output, q, k, v, g, beta, states, row_starts, block_ids, has_state, stride_q, stride_k, stride_v, stride_g,
    stride_beta, stride_block, HEADS: tl.constexpr, SHARE: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, MOST_ROWS: tl.constexpr,
):  # fmt: skip
    """Carry VALUES columns of one head's state [KEY_DIM, VALUE_DIM] through a sequence of MOST_ROWS at most: the gated
    delta rule.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(row_starts + sequence)
    num_rows = tl.load(row_starts + sequence + 1) - first
    if num_rows > MOST_ROWS:
        return
    columns = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    dims = tl.arange(0, KEYS)
    mask = (dims < KEY_DIM)[:, None] & (columns < VALUE_DIM)[None, :]
    base = states + tl.load(block_ids + sequence).to(tl.int64) * stride_block
    where = base + (head * KEY_DIM + dims[:, None]) * VALUE_DIM + columns[None, :]
    state = tl.load(where, mask=mask & ((columns[None, :] * 0 + tl.load(has_state + sequence)) != 0), other=0.0)
    state = correct_rows(state, output, q, k, v, g, beta, head, columns, first, num_rows, stride_q, stride_k, stride_v,
                         stride_g, stride_beta, HEADS, SHARE, KEY_DIM, VALUE_DIM, KEYS)  # fmt: skip
    tl.store(where, state, mask=mask)
