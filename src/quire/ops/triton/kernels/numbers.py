"""Conversions between dtypes, by bit manipulation if some GPU or the interpreter lacks them.

The interpreter truncates when it converts to bfloat16, and computes with the bits of bfloat16 as if they were integers.
So kernels compute in float32, and bfloat16 operands of `tl.dot` are widened in the interpreter.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# Numbers of KV cache formats in kernels.
PLAIN = tl.constexpr(0)
INT8 = tl.constexpr(1)
FLOAT8 = tl.constexpr(2)
# Adding this constant to a value below 2^22 rounds it to an integer, half to even.
WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23
# Adding this constant to a magnitude below 2^-6 rounds it to a multiple of 2^-9, the smallest subnormal of e4m3.
SUBNORMAL_E4M3 = tl.constexpr(16384.0)
# Vectors without a larger magnitude are stored as zeros in int8; `LEAST_SCALED` of the interface.
LEAST = tl.constexpr(1e-36)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round float32 to a dtype, half to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
        x = tl.where(x == x, even, x)
    return x.to(dtype)


@triton.jit
def as_stored(x, dtype: tl.constexpr):
    """Round float32 to a dtype and back."""
    return rounded(x, dtype).to(tl.float32)


@triton.jit
def factor(x):
    """Return an operand of `tl.dot`: `x` itself, or in the interpreter float32 for bfloat16."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
    return x


@triton.jit
def whole(x):
    """Round float32 below 2^22 to integers, half to even."""
    return (x + WHOLE) - WHOLE


@triton.jit
def from_e4m3(code):
    """Convert e4m3 codes (uint8) to float32."""
    wide = code.to(tl.uint16)
    # As bits of float16, the code is 2^-8 of its value, also for subnormals.
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def to_e4m3(x):
    """Convert float32 to e4m3 codes (uint8), half to even, saturating."""
    size = tl.abs(x)
    bounded = tl.where(size > 448.0, 448.0, size)
    bits = bounded.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    small = (bounded + SUBNORMAL_E4M3).to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(bounded < 0.015625, small, normal)
    code = tl.where(x == x, code, 0x7F)
    sign = (x.to(tl.uint32, bitcast=True) >> 31) << 7
    return (code | sign).to(tl.uint8)


@triton.jit
def int8_scales(x):
    """Return the scale of each row of float32 [rows, D]; NaN for a row with a value that is not finite."""
    reach = tl.max(tl.abs(x), 1)
    # 0 for finite rows, else NaN.
    poison = tl.sum(x * 0.0, 1)
    return tl.where(reach <= LEAST, 0.0, tl.div_rn(reach, 127.0)) + poison


@triton.jit
def to_int8(x, scales):
    """Return rows [rows, D] divided by their scales, rounded to int8; zeros for a scale of 0 or NaN."""
    usable = scales > 0.0
    divisor = tl.where(usable, scales, 1.0)[:, None]
    numbers = whole(tl.div_rn(x, divisor + tl.zeros_like(x)))
    return tl.where(usable[:, None], numbers, 0.0).to(tl.int8)


@triton.jit
def sigmoid(x):
    """Return sigmoids of float32."""
    return 1.0 / (1.0 + tl.exp(-x))
