"""Mamba 2 over paged states for prompts (chunked SSD scan): within a chunk, rows interact by matmuls; a state is
carried from chunk to chunk.

With `l` the running sum of the logarithms of decay within a chunk, X the values times their steps, and `S` the state
before the chunk:

```
 y = tril(C B' * exp(l - l')) X + exp(l) (C S')
 S = exp(l_end) S + (X * exp(l_end - l))' B
```

A first kernel computes the terms without a state, for all chunks in parallel; a second one carries tiles of states
through the chunks of a sequence. The matmuls multiply later rows by a mask of 0, which gives NaN if a value is not
finite. So the first kernel flags such chunks, and from the first flagged chunk on, the second kernel goes row by row.

Source: Mamba 2, arXiv 2405.21060.
"""

import triton
import triton.language as tl

from quire.ops.triton.kernels.numbers import factor
from quire.ops.triton.kernels.states import scan_rows, softplus
from quire.ops.triton.launcher import kernel

# Minimum logarithm of decay: its exponential, and the exponential of any sum that includes it, is 0 in float32.
LEAST_LOG = tl.constexpr(-1e4)
# Number of flags that are loaded at once.
FLAGS = tl.constexpr(128)


@triton.jit
def _rest(x, part):
    """Return the difference of float32 and a part of it; 0 instead of NaN."""
    difference = x - part.to(tl.float32)
    return tl.where(difference == difference, difference, 0.0)


@triton.jit
def _parts(x):
    """Split float32 into three bfloat16 terms whose sum is exact."""
    high = x.to(tl.bfloat16)
    error = _rest(x, high)
    middle = error.to(tl.bfloat16)
    return factor(high), factor(middle), factor(_rest(error, middle).to(tl.bfloat16))


@triton.jit
def _half_parts(x):
    """Split columns of float32 into three float16 terms, and a power of 2 per column that was divided out. Term i is
    stored times 2 ** (11 * i), since float16 has a small range.
    """
    exponent = tl.max(tl.abs(x), 0).to(tl.int32, bitcast=True) & 0x7F800000
    # Only powers with a finite reciprocal; columns that are not finite, or tiny, are not scaled.
    exponent = tl.where((exponent > 0) & (exponent < 0x7F000000), exponent, 0x3F800000)
    unit = x * (0x7F000000 - exponent).to(tl.float32, bitcast=True)[None, :]
    high = unit.to(tl.float16)
    error = _rest(unit, high) * 2048.0
    middle = error.to(tl.float16)
    return high, middle, (_rest(error, middle) * 2048.0).to(tl.float16), exponent.to(tl.float32, bitcast=True)[None, :]


@triton.jit
def _product(a, b):
    """Multiply two matrices: 16-bit operands directly; a float32 operand keeps its precision, split into 16-bit terms,
    whose matmuls take few registers; other pairs of dtypes by 3xTF32.
    """
    if a.dtype == b.dtype and a.dtype != tl.float32:
        product = tl.dot(factor(a), factor(b))
    elif a.dtype == tl.bfloat16:
        high, middle, low = _parts(b)
        product = tl.dot(factor(a), low)
        product = tl.dot(factor(a), middle, product)
        product = tl.dot(factor(a), high, product)
    elif b.dtype == tl.bfloat16:
        high, middle, low = _parts(a)
        product = tl.dot(low, factor(b))
        product = tl.dot(middle, factor(b), product)
        product = tl.dot(high, factor(b), product)
    elif a.dtype == tl.float16:
        high, middle, low, scale = _half_parts(b)
        product = tl.dot(a, low) * (1.0 / 2048.0)
        product = tl.dot(a, middle, product) * (1.0 / 2048.0)
        product = tl.dot(a, high, product) * scale
    else:
        product = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3")
    return product


@triton.jit
def decays_between(logs, CHUNK: tl.constexpr):
    """Return cumulative decay factors: [row, earlier row] from each earlier row of a chunk to each row, 0 above the
    diagonal; from the chunk's start to each row; from each row to the chunk's end.

    The cumulative sum is kept as two float32 terms: after a row with a decay of 0 it is large, and differences of
    neighbouring rows must still be exact.
    """
    lanes = tl.arange(0, CHUNK)
    exact = tl.where(logs < LEAST_LOG, LEAST_LOG, logs).to(tl.float64)
    running, whole = tl.cumsum(exact, 0), tl.sum(exact, 0)
    high = running.to(tl.float32)
    low = (running - high.to(tl.float64)).to(tl.float32)
    gaps = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    # Above the diagonal the exponential could overflow.
    is_seen = lanes[None, :] <= lanes[:, None]
    between = tl.where(is_seen, tl.exp(tl.where(is_seen, gaps, 0.0)), 0.0)
    return between, tl.exp(high), tl.exp((whole - running).to(tl.float32))


@triton.jit
def num_finite(flags, chunk, num_chunks, head, HEADS: tl.constexpr):
    """Return the number of chunks of a sequence, from `chunk` on, before the first flagged one."""
    count = num_chunks
    for start in range(0, num_chunks, FLAGS):
        places = start + tl.arange(0, FLAGS)
        flag = tl.load(flags + (chunk + places) * HEADS + head, mask=places < num_chunks, other=0)
        count = tl.minimum(count, tl.min(tl.where(flag != 0, places, num_chunks), 0))
    return count


@kernel
def scan_within_chunks(
    output, decays, flags, x, B, C, dt, A, dt_bias, skips, chunk_starts, chunk_ends, stride_x, stride_B,
    stride_C, stride_dt, HEADS: tl.constexpr, SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr,
    DIM: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute the output of one head's rows of a chunk as if the state before it were 0: Mamba 2.

    DIM and PART are the widths of the tiles of values, and of rows of B and C.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    lanes = tl.arange(0, CHUNK)
    at = tl.load(chunk_starts + chunk).to(tl.int64) + lanes
    is_row = at < tl.load(chunk_ends + chunk)
    by_row, is_known = at[:, None], is_row[:, None]
    group = head // SHARE * STATE_DIM
    alike = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in range(0, STATE_DIM, PART):
        columns = start + tl.arange(0, PART)[None, :]
        mask = is_known & (columns < STATE_DIM)
        write = tl.load(B + by_row * stride_B + group + columns, mask=mask, other=0.0)
        read = tl.load(C + by_row * stride_C + group + columns, mask=mask, other=0.0)
        alike += _product(read, tl.trans(write))
    raw_step = tl.load(dt + at * stride_dt + head, mask=is_row, other=0.0).to(tl.float32)
    step = tl.where(is_row, softplus(raw_step + tl.load(dt_bias + head)), 0.0)
    logs = step * tl.load(A + head)
    between, from_start, to_end = decays_between(logs, CHUNK)
    # A column, not a vector: Triton 3.6 and 3.7 fail to compile a reduction of one dimension after one of a product.
    poison = ((step + logs) * 0.0)[:, None] + tl.sum(alike * 0.0, 1, keep_dims=True)
    mixed = alike * between * step[None, :]
    skip = tl.load(skips + head)
    for start in range(0, HEAD_DIM, DIM):
        dims = start + tl.arange(0, DIM)[None, :]
        mask = is_known & (dims < HEAD_DIM)
        values = tl.load(x + by_row * stride_x + head * HEAD_DIM + dims, mask=mask, other=0.0)
        wide = values.to(tl.float32)
        poison += tl.sum(wide * 0.0, 1, keep_dims=True)
        tl.store(output + (by_row * HEADS + head) * HEAD_DIM + dims, _product(mixed, values) + skip * wide, mask=mask)
    left = decays + (chunk * HEADS + head).to(tl.int64) * 2 * CHUNK + lanes
    tl.store(left, from_start)
    tl.store(left + CHUNK, step * to_end)
    total = tl.sum(poison, 0)
    tl.store(flags + chunk * HEADS + head + tl.arange(0, 1), (total != total).to(tl.int32))


@kernel
def scan_across_chunks(
    output, decays, flags, x, B, C, dt, A, dt_bias, skips, states, row_starts, block_ids, has_state, sequences,
    first_chunks, stride_x, stride_B, stride_C, stride_dt, stride_block, HEADS: tl.constexpr,
    SHARE: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_DIM: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Carry DIM rows of one head's state [HEAD_DIM, STATE_DIM] through a sequence's chunks, and add its contribution to
    the output: Mamba 2.
    """
    number, head = tl.program_id(0), tl.program_id(1)
    sequence, chunk = tl.load(sequences + number), tl.load(first_chunks + number)
    num_chunks = num_finite(flags, chunk, tl.load(first_chunks + number + 1) - chunk, head, HEADS)
    first, end = tl.load(row_starts + sequence), tl.load(row_starts + sequence + 1)
    tile = tl.program_id(2) * DIM + tl.arange(0, DIM)
    dims, lanes = tile[None, :], tl.arange(0, CHUNK)
    columns = tl.arange(0, WIDTH)
    mask = (columns < STATE_DIM)[:, None] & (dims < HEAD_DIM)
    base = states + tl.load(block_ids + sequence).to(tl.int64) * stride_block
    where = base + (head * HEAD_DIM + dims) * STATE_DIM + columns[:, None]
    state = tl.load(where, mask=mask & ((dims * 0 + tl.load(has_state + sequence)) != 0), other=0.0)
    group = head // SHARE * STATE_DIM
    for index in range(num_chunks):
        at = (first + index * CHUNK).to(tl.int64) + lanes
        by_row, is_known = at[:, None], (at < end)[:, None]
        left = decays + ((chunk + index) * HEADS + head).to(tl.int64) * 2 * CHUNK
        from_start, through = tl.load(left + lanes), tl.load(left + CHUNK - 1)
        to_end = tl.load(left + CHUNK + lanes)
        valid = is_known & (columns < STATE_DIM)[None, :]
        read = tl.load(C + by_row * stride_C + group + columns[None, :], mask=valid, other=0.0)
        write = tl.load(B + by_row * stride_B + group + columns[None, :], mask=valid, other=0.0)
        valid = is_known & (dims < HEAD_DIM)
        values = tl.load(x + by_row * stride_x + head * HEAD_DIM + dims, mask=valid, other=0.0).to(tl.float32)
        out = output + (by_row * HEADS + head) * HEAD_DIM + dims
        total = tl.load(out, mask=valid, other=0.0) + _product(read, state) * from_start[:, None]
        tl.store(out, total, mask=valid)
        state = state * through + _product(tl.trans(write), values * to_end[:, None])
    start = tl.minimum(first + num_chunks * CHUNK, end)
    by_dim = scan_rows(tl.trans(state), output, x, B, C, dt, A, dt_bias, skips, head, tile, start, end - start,
                       stride_x, stride_B, stride_C, stride_dt, HEADS, SHARE, HEAD_DIM, STATE_DIM, WIDTH)  # fmt: skip
    tl.store(where, tl.trans(by_dim), mask=mask)
