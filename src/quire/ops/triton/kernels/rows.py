"""Row-wise operations between the matmuls: norms, gates; and the token bitmasks of logits."""

import triton
import triton.language as tl

from quire.ops.triton.kernels.numbers import as_stored, rounded, sigmoid
from quire.ops.triton.kernels.overlap import wait_for_previous
from quire.ops.triton.launcher import kernel

# Activations of a gate, in the order of `interface.Activation`.
SILU = tl.constexpr(0)
GELU_TANH = tl.constexpr(1)
SWIGLUOAI = tl.constexpr(2)


@kernel
def rms_norm(output, x, weight, eps, width, stride_row, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr):
    """Apply RMSNorm to a row, rounded to the weight's dtype after each step, then to the output's."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    mask = columns < width
    wide = tl.load(x + row * stride_row + columns, mask=mask, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    scale_dtype: tl.constexpr = weight.dtype.element_ty
    scales = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    scaled = as_stored(as_stored(wide * inverse, scale_dtype) * scales, scale_dtype)
    tl.store(output + row * width + columns, rounded(scaled, output.dtype.element_ty), mask=mask)


@triton.jit
def activated(gates, ups, ACTIVATION: tl.constexpr):
    """Return float32 `ups`, gated by activations of `gates`."""
    if ACTIVATION == SILU:
        factors = sigmoid(gates)
    elif ACTIVATION == SWIGLUOAI:
        # `tl.where`, not `tl.minimum`, which would drop a NaN.
        gates = tl.where(gates > 7.0, 7.0, gates)
        factors = sigmoid(1.702 * gates)
        ups = tl.where(ups > 7.0, 7.0, tl.where(ups < -7.0, -7.0, ups)) + 1.0
    else:
        # 0.5 * (1 + tanh(z)) is sigmoid(2 * z).
        factors = sigmoid(1.5957691216057308 * (gates + 0.044715 * gates * gates * gates))
    return gates * factors * ups


@kernel
def gate(output, gate_up, width, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr):
    """Apply the activation to gates and multiply by the up values, for COLUMNS columns of a row."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < width
    base = gate_up + row * 2 * width + columns
    gates = tl.load(base, mask=mask, other=0.0).to(tl.float32)
    ups = tl.load(base + width, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + row * width + columns, rounded(activated(gates, ups, ACTIVATION), output.dtype.element_ty),
             mask=mask)  # fmt: skip


@kernel(do_not_specialize=["size"])
def sigmoid_gate(output, x, gates, size, COLUMNS: tl.constexpr):
    """Multiply by sigmoids of gates, which are rounded to the dtype first."""
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = at < size
    dtype: tl.constexpr = output.dtype.element_ty
    factors = as_stored(sigmoid(tl.load(gates + at, mask=mask, other=0.0).to(tl.float32)), dtype)
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + at, rounded(values * factors, dtype), mask=mask)


@kernel
def gated_norm(output, x, gates, weight, eps, width, num_parts, stride_gates, WIDTH: tl.constexpr):
    """Gate one part of a row, norm it and scale it."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    mask = columns < width
    at = row * num_parts * width + part * width + columns
    values = tl.load(x + at, mask=mask, other=0.0)
    factors = tl.load(gates + row * stride_gates + part * width + columns, mask=mask, other=0.0).to(tl.float32)
    values *= factors * sigmoid(factors)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + eps)
    scales = tl.load(weight + part * width + columns, mask=mask, other=0.0)
    tl.store(output + at, rounded(values * inverse * scales, output.dtype.element_ty), mask=mask)


@kernel
def apply_token_bitmask(logits, rows, masks, vocab_size, num_words, COLUMNS: tl.constexpr):
    """Set the logits of forbidden tokens to -inf, for COLUMNS tokens of one row."""
    entry = tl.program_id(0)
    tokens = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_token = tokens < vocab_size
    words = tl.load(masks + entry.to(tl.int64) * num_words + tokens // 32, mask=is_token, other=0)
    is_allowed = ((words >> (tokens % 32)) & 1) == 1
    row = tl.load(rows + entry).to(tl.int64)
    tl.store(logits + row * vocab_size + tokens, float("-inf"), mask=is_token & (is_allowed == 0))
