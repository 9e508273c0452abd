"""Paged attention over a shared prefix (cascade attention): a tile has rows of several sequences, a key is read once.

```
 work item   rows of sequences whose tables begin with the same blocks, and a range of tokens in these blocks
 its tile    a row of one sequence: G query heads | a row of another: G query heads | ...        [ROWS, D]
```

All rows see all tokens of an item, so there are no masks. Each row stores a partial result, as for a split of its own
context (`attention.py`); `combine` adds it to the partial results of the tokens that the sequence does not share.
"""

import triton.language as tl

from quire.ops.triton.kernels.attention import attend_tile, block_ids, partial_lanes, store_part
from quire.ops.triton.kernels.numbers import factor
from quire.ops.triton.launcher import kernel

# Fields of a work item (int32): index of its first row in `item_rows`, number of rows, offset of a block table with its
# blocks, first token, end of the tokens, index of this split of the shared tokens; padded to SHARED_ITEM.
SHARED_ITEM = tl.constexpr(8)
# Fields of a row of an item (int32): row of the step, index of its partial result for the first split, stride to the
# partial result for the next split; padded to SHARED_ROW.
SHARED_ROW = tl.constexpr(4)


@kernel
def attend_shared(
    partial_sums, partial_softmax, queries, keys, values, key_scales, value_scales, tables, items, item_rows, count,
    stride_row, stride_head, stride_block, stride_kv_head, score_scale, soft_cap,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, STORED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Compute attention of the rows of items for the query heads of one KV head; see the head of this file.

    `score_scale` includes log2(e). Programs are persistent: each loops over the `count` items with a stride of the
    number of programs, so that one grid serves any number of items.
    """
    kv_head = tl.program_id(1)
    lanes = tl.arange(0, ROWS)
    rows, heads = lanes // GROUP, kv_head * GROUP + lanes % GROUP
    dims = tl.arange(0, DIM)
    dtype: tl.constexpr = queries.dtype.element_ty
    offset = kv_head.to(tl.int64) * stride_kv_head
    keys, values = keys + offset, values + offset
    key_scales, value_scales = key_scales + offset // 4, value_scales + offset // 4
    for idx in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        item = items + idx * SHARED_ITEM
        first_row, num_rows, table = tl.load(item), tl.load(item + 1), tables + tl.load(item + 2)
        first, end, part = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
        is_row = rows < num_rows
        entry = item_rows + (first_row + rows) * SHARED_ROW
        at = tl.load(entry, mask=is_row, other=0).to(tl.int64)
        places = tl.load(entry + 1, mask=is_row, other=0) + part * tl.load(entry + 2, mask=is_row, other=0)
        where = queries + at[:, None] * stride_row + heads[:, None] * stride_head + dims[None, :]
        q = factor(tl.load(where, mask=is_row[:, None] & (dims < HEAD_DIM)[None, :], other=0.0))
        sums = tl.zeros([ROWS, DIM], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        ids = block_ids(table, first, first, end, BLOCK_SIZE, TOKENS)
        for token in range(first, end, TOKENS):
            next_ids = block_ids(table, token + TOKENS, first, end, BLOCK_SIZE, TOKENS)
            sums, peak, weight = attend_tile(
                sums, peak, weight, q, rows, token, first, end, ids, keys, values, key_scales, value_scales,
                stride_block, score_scale, soft_cap, 0, 0, HEAD_DIM, BLOCK_SIZE, WIDTH, TOKENS, CAPPED, STORED, False,
                False, False, dtype,
            )  # fmt: skip
            ids = next_ids
        lane = partial_lanes(places, kv_head, lanes, NUM_KV, GROUP)
        store_part(partial_sums, partial_softmax, sums, peak, weight, lane, is_row, dims, DIM)
