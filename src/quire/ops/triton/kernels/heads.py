"""QK norm, RoPE, and the write of keys and values to the KV cache by slot mapping, fused in one kernel."""

import triton
import triton.language as tl

from quire.ops.triton.kernels.numbers import (
    FLOAT8,
    PLAIN,
    as_stored,
    int8_scales,
    rounded,
    to_e4m3,
    to_int8,
)
from quire.ops.triton.kernels.overlap import wait_for_previous
from quire.ops.triton.launcher import kernel


@triton.jit
def _normed(x, norm_scales, inverse, dtype: tl.constexpr):
    """Scale heads [HEADS, DIM] by their inverse RMS and the norm's weight, rounding as the unfused norm does."""
    scale_dtype: tl.constexpr = norm_scales.dtype
    unit = as_stored(x * inverse[:, None], scale_dtype)
    return as_stored(as_stored(unit * norm_scales.to(tl.float32), scale_dtype), dtype)


@triton.jit
def _store(vectors, base, scale_base, starts, dims, mask, HEAD_DIM: tl.constexpr, STORED: tl.constexpr):
    """Store float32 vectors [HEADS, DIM], rounded to the model's dtype, in slots at offsets `starts` [HEADS]."""
    where = base + starts[:, None] + dims[None, :]
    if STORED == PLAIN:
        tl.store(where, rounded(vectors, base.dtype.element_ty), mask=mask)
    elif STORED == FLOAT8:
        tl.store(where, to_e4m3(vectors), mask=mask)
    else:
        masked = tl.where(mask, vectors, 0.0)
        scales = int8_scales(masked)
        tl.store(where, to_int8(masked, scales), mask=mask)
        tl.store(scale_base + (starts + HEAD_DIM) // 4, scales, mask=tl.max(mask.to(tl.int32), 1) > 0)


@kernel
def prepare_heads(
    queries, qkv, cos, sin, norm_scales, slots, keys, values, key_scales, value_scales, eps, stride_block,
    stride_head, NUM_QUERIES: tl.constexpr, NUM_KV: tl.constexpr, NUM_NORMED: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Norm HEADS heads of a row and apply RoPE; store its queries, and its keys and values in their slots."""
    wait_for_previous(OVERLAPS)
    num_heads: tl.constexpr = NUM_QUERIES + 2 * NUM_KV
    dtype: tl.constexpr = qkv.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, DIM)
    half: tl.constexpr = HEAD_DIM // 2
    swapped = tl.where(dims < half, dims + half, dims - half)
    mask = (heads < num_heads)[:, None] & (dims < HEAD_DIM)[None, :]
    base = qkv + (row * num_heads + heads[:, None]) * HEAD_DIM
    x = tl.load(base + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(base + swapped[None, :], mask=mask, other=0.0).to(tl.float32)
    if NUM_NORMED > 0:
        normed = (heads < NUM_NORMED)[:, None]
        inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)
        scale_base = norm_scales + heads[:, None] * HEAD_DIM
        scales = tl.load(scale_base + dims[None, :], mask=mask & normed, other=0.0)
        x = tl.where(normed, _normed(x, scales, inverse, dtype), x)
        scales = tl.load(scale_base + swapped[None, :], mask=mask & normed, other=0.0)
        other = tl.where(normed, _normed(other, scales, inverse, dtype), other)
    angles = row * HEAD_DIM + dims
    cosine = tl.load(cos + angles, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    sine = tl.load(sin + angles, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    turned = as_stored(x * cosine[None, :] + other * sine[None, :], dtype)
    is_query = (heads < NUM_QUERIES)[:, None]
    where = queries + (row * NUM_QUERIES + heads[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(where, rounded(turned, dtype), mask=mask & is_query)
    if NUM_KV > 0:
        slot = tl.load(slots + row)
        in_block = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * WIDTH
        key = heads - NUM_QUERIES
        is_key = (key >= 0) & (key < NUM_KV)
        starts = in_block + key.to(tl.int64) * stride_head
        _store(turned, keys, key_scales, starts, dims, mask & is_key[:, None], HEAD_DIM, STORED)
        value = key - NUM_KV
        starts = in_block + value.to(tl.int64) * stride_head
        _store(x, values, value_scales, starts, dims, mask & (value >= 0)[:, None], HEAD_DIM, STORED)
