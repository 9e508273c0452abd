"""Paged attention over ragged rows: the query heads of a KV head share a tile (packed GQA), long contexts are split.

```
 work item   some rows of one sequence, and a range of its tokens
 its tile    row 0: G query heads | row 1: G query heads | ...        [ROWS, D]
 its tokens  |<-- tile of keys -->|<-- tile of keys -->|...           TOKENS each, aligned to TOKENS
```

The block ids of the next tile of keys are loaded while this one is computed: loading them in the iteration that needs
them would take a stage of the compiler's software pipeline away from the loads of keys and values that depend on them.
"""

import triton
import triton.language as tl

from quire.ops.triton.kernels.numbers import FLOAT8, INT8, PLAIN, factor, from_e4m3, rounded
from quire.ops.triton.kernels.overlap import prefetch, wait_for_previous
from quire.ops.triton.launcher import kernel

# Fields of a work item (int32): first row, number of rows, position of the first row, offset of the sequence's block
# table, first token to read, end of the tokens to read, index of its first partial result or -1; padded to ITEM.
ITEM = tl.constexpr(8)
# Fields of rows with split contexts (int32): first row, number of rows, index of the first partial result, number of
# splits. Each row has a partial result in each split.
SPLIT_ROWS = tl.constexpr(4)


@triton.jit
def block_ids(table, token, first, end, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr):
    """Load the block id of each token of a tile; table entries of tokens outside [first, end) are not read."""
    tokens = token + tl.arange(0, TOKENS)
    return tl.load(table + tokens // BLOCK_SIZE, mask=(tokens >= first) & (tokens < end), other=0)


@triton.jit
def _prefetch_tile(ids, token, keys, values, stride_block, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                   WIDTH: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """Prefetch the keys and values of a tile into L2, by cache lines of 128 bytes."""
    per_line: tl.constexpr = 1024 // keys.dtype.element_ty.primitive_bitwidth
    lines = tl.arange(0, triton.next_power_of_2(triton.cdiv(HEAD_DIM, per_line))) * per_line
    starts = ids.to(tl.int64) * stride_block + (token + tl.arange(0, TOKENS)) % BLOCK_SIZE * WIDTH
    where = starts[:, None] + lines[None, :]
    prefetch(keys + where)
    prefetch(values + where)


@triton.jit
def _vectors(base, scale_base, starts, is_token, dims, dtype: tl.constexpr, HEAD_DIM: tl.constexpr,
             STORED: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Load the vectors [TOKENS, DIM] of the slots at offsets `starts` as operands of `tl.dot`, and their scales."""
    where = base + starts[:, None] + dims[None, :]
    full: tl.constexpr = dims.shape[0] == HEAD_DIM
    if MASKED:
        vectors = tl.load(where, mask=is_token[:, None] & (dims < HEAD_DIM)[None, :], other=0)
    elif full:
        vectors = tl.load(where)
    else:
        vectors = tl.load(where, mask=(dims < HEAD_DIM)[None, :], other=0)
    scales = is_token.to(tl.float32)
    if STORED == INT8:
        scales = tl.load(scale_base + (starts + HEAD_DIM) // 4, mask=is_token, other=0.0)
    if STORED == FLOAT8:
        vectors = from_e4m3(vectors)
    if STORED == PLAIN:
        vectors = factor(vectors)
    elif dtype == tl.float32:
        vectors = vectors.to(tl.float32)
    else:
        vectors = factor(rounded(vectors.to(tl.float32), dtype))
    return vectors, scales


@triton.jit
def _sees(positions, tokens, window, chunk, end, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the attention mask [ROWS, TOKENS]: which tokens each row sees."""
    seen = (tokens[None, :] <= positions[:, None]) & (tokens < end)[None, :]
    if WINDOW:
        seen = seen & (tokens[None, :] > (positions - window)[:, None])
    if CHUNK:
        seen = seen & (tokens[None, :] >= (positions // chunk * chunk)[:, None])
    return seen


@triton.jit
def _score(q, starts, is_token, dims, keys, key_scales, score_scale, soft_cap, HEAD_DIM: tl.constexpr,
           CAPPED: tl.constexpr, STORED: tl.constexpr, MASKED: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """Return scores [ROWS, TOKENS] of the keys at `starts`; the softmax scale is applied only if CAPPED."""
    k, scales = _vectors(keys, key_scales, starts, is_token, dims, dtype, HEAD_DIM, STORED, MASKED)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if STORED == INT8:
        scores *= scales[None, :]
    if CAPPED:
        # Scores are exponents of 2. tanh(x) = 1 - 2 / (e^2x + 1) cancels for small x: a polynomial is used there.
        limit = soft_cap * 1.4426950408889634
        x = scores * score_scale / limit
        large = 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)
        square = x * x
        small = ((62.0 / 2835.0 * square - 17.0 / 315.0) * square + 2.0 / 15.0) * square - 1.0 / 3.0
        scores = limit * tl.where(square < 0.0625, x + x * square * small, large)
    return scores


@triton.jit
def _weigh(scores, peak, weight, score_scale, CAPPED: tl.constexpr):
    """Return softmax weights [ROWS, TOKENS], the factor that rescales earlier sums, and new peaks and weights of rows.

    The scale is not negative, so the maximum can be taken of unscaled scores; scaling the scores themselves is then
    fused with subtracting the peak.
    """
    peaks = tl.max(scores, 1)
    if not CAPPED:
        peaks *= score_scale
    new_peak = tl.maximum(peak, peaks)
    # A row that has seen no token yet has a peak of -inf; the offset must be finite, or differences would be NaN.
    offset = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    if CAPPED:
        weights = tl.exp2(scores - offset[:, None])
    else:
        weights = tl.exp2(scores * score_scale - offset[:, None])
    decay = tl.exp2(peak - offset)
    return weights, decay, new_peak, weight * decay + tl.sum(weights, 1)


@triton.jit
def attend_tile(
    sums, peak, weight, q, positions, token, first, end, ids, keys, values, key_scales, value_scales, stride_block,
    score_scale, soft_cap, window, chunk, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, CAPPED: tl.constexpr,
    STORED: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys and values to the running softmax of each row."""
    tokens = token + tl.arange(0, TOKENS)
    dims = tl.arange(0, sums.shape[1])
    is_token = (tokens >= first) & (tokens < end)
    starts = ids.to(tl.int64) * stride_block + (tokens % BLOCK_SIZE) * WIDTH
    scores = _score(q, starts, is_token, dims, keys, key_scales, score_scale, soft_cap, HEAD_DIM, CAPPED, STORED,
                    MASKED, dtype)  # fmt: skip
    if MASKED:
        scores = tl.where(_sees(positions, tokens, window, chunk, end, WINDOW, CHUNK), scores, float("-inf"))
    weights, decay, new_peak, weight = _weigh(scores, peak, weight, score_scale, CAPPED)
    v, scales = _vectors(values, value_scales, starts, is_token, dims, dtype, HEAD_DIM, STORED, MASKED)
    if STORED == INT8:
        weights *= scales[None, :]
    sums = tl.dot(factor(rounded(weights, dtype)), v, sums * decay[:, None], input_precision="ieee")
    return sums, new_peak, weight


@triton.jit
def _attend_in_turn(
    sums, peak, weight, q, positions, begin, middle, first, end, ids, table, keys, values, key_scales, value_scales,
    stride_block, score_scale, soft_cap, window, chunk, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, CAPPED: tl.constexpr, STORED: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return sums, peaks and weights of rows after the tiles of [begin, end); tiles before `middle` need no mask."""
    for token in range(begin, middle, TOKENS):
        next_ids = block_ids(table, token + TOKENS, first, end, BLOCK_SIZE, TOKENS)
        sums, peak, weight = attend_tile(
            sums, peak, weight, q, positions, token, first, end, ids, keys, values, key_scales, value_scales,
            stride_block, score_scale, soft_cap, window, chunk, HEAD_DIM, BLOCK_SIZE, WIDTH, TOKENS, CAPPED, STORED,
            WINDOW, CHUNK, False, dtype,
        )  # fmt: skip
        ids = next_ids
    for token in range(middle, end, TOKENS):
        next_ids = block_ids(table, token + TOKENS, first, end, BLOCK_SIZE, TOKENS)
        sums, peak, weight = attend_tile(
            sums, peak, weight, q, positions, token, first, end, ids, keys, values, key_scales, value_scales,
            stride_block, score_scale, soft_cap, window, chunk, HEAD_DIM, BLOCK_SIZE, WIDTH, TOKENS, CAPPED, STORED,
            WINDOW, CHUNK, True, dtype,
        )  # fmt: skip
        ids = next_ids
    return sums, peak, weight


@triton.jit
def _attend_pipelined(
    sums, peak, weight, q, positions, begin, middle, first, end, ids, table, keys, values, stride_block, score_scale,
    window, chunk, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """As `_attend_in_turn`, but add the values of a tile while the softmax of the next one is computed.

    The PV matmul of a tile is issued after the QK matmul of the next tile, and nothing waits for it until the QK matmul
    after that: tensor cores compute it during the softmax.

    ```
     tensor cores   scores 1 | sums 0 ............ | scores 2 | sums 1 ............ | scores 3
     other units             | softmax of scores 1 |          | softmax of scores 2 |
    ```

    Source: FlashAttention-3, arXiv 2407.08608, section 3.2.
    """
    dims = tl.arange(0, sums.shape[1])
    # The first iteration has no previous tile: it adds the first tile's own values, or masked zeros, with weights of 0.
    starts = ids.to(tl.int64) * stride_block + (begin + tl.arange(0, TOKENS)) % BLOCK_SIZE * WIDTH
    weights = tl.zeros([sums.shape[0], TOKENS], tl.float32)
    decay = tl.full([sums.shape[0]], 1.0, tl.float32)
    for token in range(begin, middle, TOKENS):
        next_ids = block_ids(table, token + TOKENS, first, end, BLOCK_SIZE, TOKENS)
        sums, peak, weight, decay, weights, starts = _attend_behind(
            sums, peak, weight, decay, weights, starts, q, positions, token, first, end, ids, keys, values,
            stride_block, score_scale, window, chunk, HEAD_DIM, BLOCK_SIZE, WIDTH, TOKENS, WINDOW, CHUNK, False, dtype,
        )  # fmt: skip
        ids = next_ids
    for token in range(middle, end, TOKENS):
        next_ids = block_ids(table, token + TOKENS, first, end, BLOCK_SIZE, TOKENS)
        sums, peak, weight, decay, weights, starts = _attend_behind(
            sums, peak, weight, decay, weights, starts, q, positions, token, first, end, ids, keys, values,
            stride_block, score_scale, window, chunk, HEAD_DIM, BLOCK_SIZE, WIDTH, TOKENS, WINDOW, CHUNK, True, dtype,
        )  # fmt: skip
        ids = next_ids
    tokens = (end - 1) // TOKENS * TOKENS + tl.arange(0, TOKENS)
    is_token = (tokens >= first) & (tokens < end)
    return _add_values(sums, decay, weights, starts, is_token, dims, values, HEAD_DIM, True, dtype), peak, weight


@triton.jit
def _attend_behind(
    sums, peak, weight, decay, weights, starts, q, positions, token, first, end, ids, keys, values, stride_block,
    score_scale, window, chunk, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Add the values of the previous tile to the sums, and a tile of keys to the running softmax of each row.

    The next call adds this tile's values: its weights, the decay of sums and the offsets of its vectors are returned.
    """
    tokens = token + tl.arange(0, TOKENS)
    dims = tl.arange(0, sums.shape[1])
    next_starts = ids.to(tl.int64) * stride_block + (tokens % BLOCK_SIZE) * WIDTH
    is_token, is_token_before = (tokens >= first) & (tokens < end), tokens - TOKENS >= first
    scores = _score(q, next_starts, is_token, dims, keys, keys, score_scale, 0.0, HEAD_DIM, False, PLAIN, MASKED, dtype)
    sums = _add_values(sums, decay, weights, starts, is_token_before, dims, values, HEAD_DIM, MASKED, dtype)
    if MASKED:
        scores = tl.where(_sees(positions, tokens, window, chunk, end, WINDOW, CHUNK), scores, float("-inf"))
    weights, decay, peak, weight = _weigh(scores, peak, weight, score_scale, False)
    return sums, peak, weight, decay, weights, next_starts


@triton.jit
def _add_values(sums, decay, weights, starts, is_token, dims, values, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr,
                dtype: tl.constexpr):  # fmt: skip
    """Add the values of a tile to the sums."""
    v, _ = _vectors(values, values, starts, is_token, dims, dtype, HEAD_DIM, PLAIN, MASKED)
    return tl.dot(factor(rounded(weights, dtype)), v, sums * decay[:, None], input_precision="ieee")


@triton.jit
def _sink_share(peak, weight, sink):
    """Add attention sinks, a logit for each row, to the softmax: return factors that rescale the sums, and weights."""
    total_peak = tl.maximum(peak, sink)
    decay = tl.exp2(peak - total_peak)
    return decay, weight * decay + tl.exp2(sink - total_peak)


@triton.jit
def partial_lanes(places, kv_head, lanes, NUM_KV: tl.constexpr, GROUP: tl.constexpr):
    """Return the index of the partial result of each lane of a tile; `places` are the indices of the lanes' rows."""
    return (places.to(tl.int64) * NUM_KV + kv_head) * GROUP + lanes % GROUP


@triton.jit
def store_part(partial_sums, partial_softmax, sums, peak, weight, lane, is_row, dims, DIM: tl.constexpr):
    """Store the unnormalised sums [ROWS, DIM], and the peak and weight, of each lane with a row."""
    tl.store(partial_sums + lane[:, None] * DIM + dims[None, :], sums, mask=is_row[:, None])
    tl.store(partial_softmax + lane * 2, peak, mask=is_row)
    tl.store(partial_softmax + lane * 2 + 1, weight, mask=is_row)


@triton.jit
def _store_rows(output, sums, peak, weight, sinks, at, heads, dims, mask, NUM_HEADS: tl.constexpr,
                HEAD_DIM: tl.constexpr, SINKS: tl.constexpr):  # fmt: skip
    """Normalise the sums of rows by their weights and store them as output, [ROWS, DIM]."""
    if SINKS:
        decay, weight = _sink_share(peak, weight, tl.load(sinks + heads) * 1.4426950408889634)
        sums *= decay[:, None]
    where = output + (at[:, None] * NUM_HEADS + heads[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(where, rounded(sums / weight[:, None], output.dtype.element_ty), mask=mask)


@kernel
def attend(
    output, partial_sums, partial_softmax, queries, keys, values, key_scales, value_scales, tables, items, counts,
    sinks, stride_row, stride_head, stride_block, stride_kv_head, score_scale, soft_cap, window, chunk,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, STORED: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, COUNTED: tl.constexpr,
    PIPELINED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute attention of the rows of a work item for the query heads of one KV head; see the head of this file.

    `score_scale` includes log2(e). With COUNTED, items whose index of a partial result is not -1 store partial results,
    and `counts[0]` is the number of items: the grid may be larger. Otherwise, with SPLIT, all items store partial
    results. PIPELINED: see `_attend_pipelined`; for caches of 16 bits.
    """
    # Items and block tables come from the host: they are loaded while the previous kernel still runs, and the first
    # keys and values are prefetched, most of which were written by earlier steps.
    if COUNTED:  # noqa: SIM102 - the compiler decides the outer condition
        if tl.program_id(0) >= tl.load(counts):
            wait_for_previous(OVERLAPS)
            return
    item, kv_head = items + tl.program_id(0) * ITEM, tl.program_id(1)
    first_row, num_rows, position = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    table, first, end, partial_idx = tables + tl.load(item + 3), tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    lanes, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    rows, heads = lanes // GROUP, kv_head * GROUP + lanes % GROUP
    mask, at = (rows < num_rows)[:, None] & (dims < HEAD_DIM)[None, :], (first_row + rows).to(tl.int64)
    dtype: tl.constexpr = queries.dtype.element_ty
    begin = first // TOKENS * TOKENS
    ids = block_ids(table, begin, first, end, BLOCK_SIZE, TOKENS)
    offset = kv_head.to(tl.int64) * stride_kv_head
    keys, values = keys + offset, values + offset
    if OVERLAPS and not PIPELINED:
        next_ids = block_ids(table, begin + TOKENS, first, end, BLOCK_SIZE, TOKENS)
        _prefetch_tile(ids, begin, keys, values, stride_block, HEAD_DIM, BLOCK_SIZE, WIDTH, TOKENS)
        _prefetch_tile(next_ids, begin + TOKENS, keys, values, stride_block, HEAD_DIM, BLOCK_SIZE, WIDTH, TOKENS)
    wait_for_previous(OVERLAPS)
    where = queries + at[:, None] * stride_row + heads[:, None] * stride_head + dims[None, :]
    q = factor(tl.load(where, mask=mask, other=0.0))
    positions = position + rows
    key_scales, value_scales = key_scales + offset // 4, value_scales + offset // 4

    sums = tl.zeros([ROWS, DIM], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    # Tiles whose tokens are visible to all rows need no mask; with a window or chunks all tiles are masked.
    middle = begin
    if not WINDOW and not CHUNK:
        middle = tl.maximum(tl.minimum(end, position + 1) // TOKENS * TOKENS, begin)
    if PIPELINED:
        sums, peak, weight = _attend_pipelined(
            sums, peak, weight, q, positions, begin, middle, first, end, ids, table, keys, values, stride_block,
            score_scale, window, chunk, HEAD_DIM, BLOCK_SIZE, WIDTH, TOKENS, WINDOW, CHUNK, dtype,
        )  # fmt: skip
    else:
        sums, peak, weight = _attend_in_turn(
            sums, peak, weight, q, positions, begin, middle, first, end, ids, table, keys, values, key_scales,
            value_scales, stride_block, score_scale, soft_cap, window, chunk, HEAD_DIM, BLOCK_SIZE, WIDTH, TOKENS,
            CAPPED, STORED, WINDOW, CHUNK, dtype,
        )  # fmt: skip

    if COUNTED:
        if partial_idx >= 0:
            lane = partial_lanes(partial_idx + rows, kv_head, lanes, NUM_KV, GROUP)
            store_part(partial_sums, partial_softmax, sums, peak, weight, lane, rows < num_rows, dims, DIM)
        else:
            _store_rows(output, sums, peak, weight, sinks, at, heads, dims, mask, NUM_KV * GROUP, HEAD_DIM, SINKS)
    elif SPLIT:
        # Loaded again: keeping the values in registers until here causes spills.
        lane, num_rows = partial_lanes(tl.load(item + 6) + rows, kv_head, lanes, NUM_KV, GROUP), tl.load(item + 1)
        store_part(partial_sums, partial_softmax, sums, peak, weight, lane, rows < num_rows, dims, DIM)
    else:
        _store_rows(output, sums, peak, weight, sinks, at, heads, dims, mask, NUM_KV * GROUP, HEAD_DIM, SINKS)


@kernel
def combine(
    output, partial_sums, partial_softmax, split_rows, counts, sinks,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr,
    SINKS: tl.constexpr, COUNTED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of an entry of `split_rows` for one query head.

    PARTS of them are loaded at once, so that their memory latencies overlap. COUNTED: `counts[1]` is the number of
    entries, and the grid may be larger.
    """
    if COUNTED:  # noqa: SIM102 - the compiler decides the outer condition
        if tl.program_id(0) >= tl.load(counts + 1):
            wait_for_previous(OVERLAPS)
            return
    entry = split_rows + tl.program_id(0) * SPLIT_ROWS
    kv_head, group_head = tl.program_id(1), tl.program_id(2)
    first_row, num_rows, partial_idx, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    head = kv_head * GROUP + group_head
    dims = tl.arange(0, DIM)
    wait_for_previous(OVERLAPS)
    for row in range(num_rows):
        sums = tl.zeros([DIM], tl.float32)
        peak = tl.full([1], float("-inf"), tl.float32)
        weight = tl.zeros([1], tl.float32)
        for first in range(0, count, PARTS):
            parts = first + tl.arange(0, PARTS)
            is_part = parts < count
            lanes = partial_lanes(partial_idx + parts * num_rows + row, kv_head, group_head, NUM_KV, GROUP)
            part_peaks = tl.load(partial_softmax + lanes * 2, mask=is_part, other=float("-inf"))
            part_weights = tl.load(partial_softmax + lanes * 2 + 1, mask=is_part, other=0.0)
            part_sums = tl.load(partial_sums + lanes[:, None] * DIM + dims[None, :], mask=is_part[:, None], other=0.0)
            new_peak = tl.maximum(peak, tl.max(part_peaks, 0))
            offset = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            decay, part_decays = tl.exp2(peak - offset), tl.exp2(part_peaks - offset)
            sums = sums * decay + tl.sum(part_sums * part_decays[:, None], 0)
            weight = weight * decay + tl.sum(part_weights * part_decays, 0)
            peak = new_peak
        if SINKS:
            decay, weight = _sink_share(peak, weight, tl.load(sinks + head) * 1.4426950408889634)
            sums *= decay
        where = output + ((first_row + row).to(tl.int64) * (NUM_KV * GROUP) + head) * HEAD_DIM + dims
        tl.store(where, rounded(sums / weight, output.dtype.element_ty), mask=dims < HEAD_DIM)
