"""The gated delta rule over paged states for prompts, in chunks (WY form): within a chunk, rows interact by matmuls; a
state is carried from chunk to chunk.

With `l` the running sum of the logarithms of decay within a chunk, and `S` the state before the chunk:

```
 (I + L) U = beta (V - exp(l) (K S))        L: beta K K' * exp(l - l') below the diagonal
 y = tril(Q K' * exp(l - l')) U + exp(l) (Q S)
 S = exp(l_end) S + K' (U * exp(l_end - l))
```

A first kernel computes the terms without a state, for all chunks in parallel: the inverse of `I + L`, times beta, the
scores of queries and keys, and keys and queries themselves. Each is stored as two float16 terms (high and low) in a
workspace of the step. A second kernel carries columns of states through the chunks of a sequence: it loads these terms,
and splits only values that it has just computed.

Keys have a norm of at most 1 and rates are at most 1, so elements of the inverse and of intermediate matrices are at
most 1: they are products of `I - beta k k'`. The matmuls multiply later rows by a mask of 0, which gives NaN if a value
is not finite. So the first kernel flags such chunks, and chunks whose terms do not fit into float16, and from the first
flagged chunk on, the second kernel goes row by row.

Sources: Gated Delta Networks, arXiv 2412.06464; in chunks as in arXiv 2406.06484.
"""

import triton
import triton.language as tl

from quire.ops.triton.kernels.state_chunks import decays_between, num_finite
from quire.ops.triton.kernels.states import correct_rows
from quire.ops.triton.launcher import kernel

# Values up to 1 are multiplied by this before they are split, since low terms are small and float16 has a small range.
UNIT = tl.constexpr(1024.0)
# Exponent of UNIT; the exponent bias of float32, and its number of mantissa bits.
UNIT_EXPONENT = tl.constexpr(10)
BIAS = tl.constexpr(127)
FRACTION = tl.constexpr(23)


@triton.jit
def _halves(x):
    """Split float32 below 65,504 into two float16 terms whose sum is accurate to 2 ** -25 or to 22 bits."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _units(reach):
    """Return a power of 2 such that `reach` divided by it is in [UNIT, 2 * UNIT), and its reciprocal."""
    exponent = reach.to(tl.int32, bitcast=True) >> FRACTION
    # Only powers with a finite reciprocal.
    exponent = tl.minimum(tl.maximum(exponent, UNIT_EXPONENT + 1), 2 * BIAS)
    inverse = (2 * BIAS + UNIT_EXPONENT - exponent) << FRACTION
    return ((exponent - UNIT_EXPONENT) << FRACTION).to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def _column_halves(x):
    """Split columns into two float16 terms; return these and the powers of 2 that were divided out."""
    units, inverses = _units(tl.max(tl.abs(x), 0))
    high, low = _halves(x * inverses[None, :])
    return high, low, units[None, :]


@triton.jit
def _product(high_a, low_a, high_b, low_b):
    """Multiply matrices of two terms each; the product of the low terms is below float32's precision and left out."""
    product = tl.dot(low_a, high_b)
    product = tl.dot(high_a, low_b, product)
    return tl.dot(high_a, high_b, product)


@triton.jit
def _inverse(below, CHUNK: tl.constexpr, LEVELS: tl.constexpr):
    """Return the inverse of `I + below`, where `below` is strictly lower triangular; `2 ** LEVELS` is CHUNK.

    Diagonal blocks are inverted, twice the size at each level: the inverse of `[[A, 0], [B, D]]` has `-1/D B 1/A` below
    the inverses of A and D. Not a Neumann series in `below`: its terms grow like binomials if keys repeat.
    """
    lanes = tl.arange(0, CHUNK)
    rows, columns = lanes[:, None], lanes[None, :]
    is_joined = (rows // 2 == columns // 2) & (rows > columns)
    inverse = tl.where(rows == columns, 1.0, 0.0) - tl.where(is_joined, below, 0.0)
    high, low = _halves(below * UNIT)
    nothing = tl.zeros_like(high)
    for level in range(1, LEVELS):
        is_joined = (rows >> (level + 1) == columns >> (level + 1)) & (rows >> level > columns >> level)
        whole_high, whole_low = _halves(inverse * UNIT)
        between = _product(whole_high, whole_low, tl.where(is_joined, high, nothing), tl.where(is_joined, low, nothing))
        between_high, between_low = _halves(between * (1.0 / UNIT))
        inverse -= _product(between_high, between_low, whole_high, whole_low) * (1.0 / UNIT / UNIT)
    return inverse


@triton.jit
def _store_halves(where, x, apart):
    """Store values as two float16 terms, `apart` elements apart; return a 0 per row, or NaN if one is not finite."""
    high, low = _halves(x)
    tl.store(where, high)
    tl.store(where + apart, low)
    return tl.sum(high.to(tl.float32) * 0.0, 1)


@kernel
def correct_within_chunks(
    pairs, squares, decays, flags, q, k, v, g, beta, chunk_starts, chunk_ends, stride_q, stride_k, stride_v, stride_g,
    stride_beta, HEADS: tl.constexpr, SHARE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Compute the matrices [CHUNK, CHUNK] of one head's rows of a chunk: the inverse, which maps errors to corrections
    U, and the scores that read U; and split keys and queries: the gated delta rule.

    PART is the width of the tiles of keys, queries and values; `2 ** LEVELS` is CHUNK.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    lanes = tl.arange(0, CHUNK)
    at = tl.load(chunk_starts + chunk).to(tl.int64) + lanes
    is_row = at < tl.load(chunk_ends + chunk)
    by_row, is_known = at[:, None], is_row[:, None]
    group = head // SHARE * KEY_DIM
    reach = tl.zeros([CHUNK], tl.float32)
    for start in range(0, KEY_DIM, PART):
        columns = start + tl.arange(0, PART)[None, :]
        query = tl.load(q + by_row * stride_q + group + columns, mask=is_known & (columns < KEY_DIM), other=0.0)
        reach = tl.maximum(reach, tl.max(tl.abs(query), 1))
    units, inverses = _units(reach)
    is_first = head % SHARE == 0
    pair_offsets = (chunk * (HEADS // SHARE) + head // SHARE).to(tl.int64) * 4 * CHUNK * KEYS + lanes[:, None] * KEYS
    asked = tl.zeros([CHUNK, CHUNK], tl.float32)
    # The padding of keys is stored too, as zeros, since whole tiles are loaded.
    for start in range(0, KEYS, PART):
        columns = start + tl.arange(0, PART)[None, :]
        mask = is_known & (columns < KEY_DIM)
        query = tl.load(q + by_row * stride_q + group + columns, mask=mask, other=0.0)
        high, low = _halves(query * inverses[:, None])
        if is_first:
            tl.store(pairs + pair_offsets + columns + 2 * CHUNK * KEYS, high)
            tl.store(pairs + pair_offsets + columns + 3 * CHUNK * KEYS, low)
        key_high, key_low = _halves(tl.load(k + by_row * stride_k + group + columns, mask=mask, other=0.0) * UNIT)
        asked += _product(high, low, tl.trans(key_high), tl.trans(key_low))
    logs = tl.load(g + at * stride_g + head, mask=is_row, other=0.0)
    rate = tl.load(beta + at * stride_beta + head, mask=is_row, other=0.0)
    between, from_start, to_end = decays_between(logs, CHUNK)
    chunk_offset = (chunk * HEADS + head).to(tl.int64) * CHUNK
    square = squares + chunk_offset * 4 * CHUNK + lanes[:, None] * CHUNK + lanes[None, :]
    poison = (logs + rate) * 0.0 + tl.where(to_end > 1.0, float("nan"), 0.0)
    poison += _store_halves(square + 2 * CHUNK * CHUNK, asked * between * (1.0 / UNIT), CHUNK * CHUNK)
    alike = tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in range(0, KEYS, PART):
        columns = start + tl.arange(0, PART)[None, :]
        mask = is_known & (columns < KEY_DIM)
        high, low = _halves(tl.load(k + by_row * stride_k + group + columns, mask=mask, other=0.0) * UNIT)
        if is_first:
            tl.store(pairs + pair_offsets + columns, high)
            tl.store(pairs + pair_offsets + columns + CHUNK * KEYS, low)
        alike += _product(high, low, tl.trans(high), tl.trans(low))
    below = tl.where(lanes[None, :] < lanes[:, None], alike * between * (rate * (1.0 / UNIT / UNIT))[:, None], 0.0)
    inverse = _inverse(below, CHUNK, LEVELS) * rate[None, :]
    poison += _store_halves(square, inverse * UNIT, CHUNK * CHUNK)
    for start in range(0, VALUE_DIM, PART):
        columns = start + tl.arange(0, PART)[None, :]
        mask = is_known & (columns < VALUE_DIM)
        value = tl.load(v + by_row * stride_v + head * VALUE_DIM + columns, mask=mask, other=0.0)
        poison += tl.sum(value.to(tl.float32) * 0.0, 1)
    left = decays + chunk_offset * 3 + lanes
    tl.store(left, from_start)
    tl.store(left + CHUNK, to_end)
    tl.store(left + 2 * CHUNK, units)
    total = tl.sum(poison, 0)
    tl.store(flags + chunk * HEADS + head, (total != total).to(tl.int32))


@kernel
def correct_across_chunks(
    output, pairs, squares, decays, flags, q, k, v, g, beta, states, row_starts, block_ids, has_state, sequences,
    first_chunks, stride_q, stride_k, stride_v, stride_g, stride_beta, stride_block, HEADS: tl.constexpr,
    SHARE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Carry VALUES columns of one head's state [KEY_DIM, VALUE_DIM] through a sequence's chunks: the gated delta
    rule.
    """
    number, head = tl.program_id(0), tl.program_id(1)
    sequence, chunk = tl.load(sequences + number), tl.load(first_chunks + number)
    num_chunks = num_finite(flags, chunk, tl.load(first_chunks + number + 1) - chunk, head, HEADS)
    first, end = tl.load(row_starts + sequence), tl.load(row_starts + sequence + 1)
    tile = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    columns, lanes = tile[None, :], tl.arange(0, CHUNK)
    dims = tl.arange(0, KEYS)
    mask = (dims < KEY_DIM)[:, None] & (columns < VALUE_DIM)
    base = states + tl.load(block_ids + sequence).to(tl.int64) * stride_block
    where = base + (head * KEY_DIM + dims[:, None]) * VALUE_DIM + columns
    state = tl.load(where, mask=mask & ((columns * 0 + tl.load(has_state + sequence)) != 0), other=0.0)
    row_lanes = lanes[:, None] * KEYS + dims[None, :]
    square_lanes = lanes[:, None] * CHUNK + lanes[None, :]
    for index in range(num_chunks):
        at = (first + index * CHUNK).to(tl.int64) + lanes
        valid = (at < end)[:, None] & (columns < VALUE_DIM)
        chunk_offset = ((chunk + index) * HEADS + head).to(tl.int64) * CHUNK
        left = decays + chunk_offset * 3
        from_start, through = tl.load(left + lanes)[:, None], tl.load(left + CHUNK - 1)
        pair = pairs + ((chunk + index) * (HEADS // SHARE) + head // SHARE).to(tl.int64) * 4 * CHUNK * KEYS + row_lanes
        square = squares + chunk_offset * 4 * CHUNK + square_lanes
        key_high, key_low = tl.load(pair), tl.load(pair + CHUNK * KEYS)
        state_high, state_low, state_units = _column_halves(state)
        expected = _product(key_high, key_low, state_high, state_low) * (state_units * (1.0 / UNIT))
        query_high, query_low = tl.load(pair + 2 * CHUNK * KEYS), tl.load(pair + 3 * CHUNK * KEYS)
        row_outputs = _product(query_high, query_low, state_high, state_low) * state_units * from_start
        value = tl.load(v + at[:, None] * stride_v + head * VALUE_DIM + columns, mask=valid, other=0.0).to(tl.float32)
        high, low, error_units = _column_halves(value - expected * from_start)
        change = _product(tl.load(square), tl.load(square + CHUNK * CHUNK), high, low) * (error_units * (1.0 / UNIT))
        high, low, change_units = _column_halves(change)
        square += 2 * CHUNK * CHUNK
        row_outputs += _product(tl.load(square), tl.load(square + CHUNK * CHUNK), high, low) * change_units
        units = tl.load(left + 2 * CHUNK + lanes)[:, None]
        tl.store(output + (at[:, None] * HEADS + head) * VALUE_DIM + columns, row_outputs * units, mask=valid)
        high, low, change_units = _column_halves(change * tl.load(left + CHUNK + lanes)[:, None])
        written = _product(tl.trans(key_high), tl.trans(key_low), high, low)
        state = state * through + written * (change_units * (1.0 / UNIT))
    start = tl.minimum(first + num_chunks * CHUNK, end)
    state = correct_rows(state, output, q, k, v, g, beta, head, tile, start, end - start, stride_q, stride_k, stride_v,
                         stride_g, stride_beta, HEADS, SHARE, KEY_DIM, VALUE_DIM, KEYS)  # fmt: skip
    tl.store(where, state, mask=mask)
