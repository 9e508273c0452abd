"""Blocks of GGUF tensors as quantised weights: each type's form, and the function that unpacks its blocks.

Functions take blocks as uint8 [N, B, bytes of a block], rows by blocks, and return new tensors only. Values are exact:
`QuantizedRows` has each scale and minimum as it is stored, or its negative.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from quire.models.gguf import tensor_types as types
from quire.models.gguf.tensor_types import TensorType
from quire.ops.interface.quantized_weight import QuantizedRows, StoredBlocks, WeightForm

# Values of the 4-bit codes of the IQ4 types, and of MXFP4 times two (its own are not all integers).
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

PLAIN_DTYPES = {types.F32.id: torch.float32, types.F16.id: torch.float16, types.BF16.id: torch.bfloat16}


class BlockType(NamedTuple):
    """A quantised type of GGUF tensors.

    Args:
        type: number, name and sizes of the type.
        form: form of its weights.
        factors: bytes of a block that hold its float16 factors: scales or super-scales, and minima.
        unpack_blocks: function that unpacks blocks, uint8 [N, B, bytes of a block].
    """

    type: TensorType
    form: WeightForm
    factors: slice
    unpack_blocks: Callable[[Tensor], QuantizedRows]

    def unpack(self, raw: Tensor) -> QuantizedRows:
        """Unpack rows, uint8 [N, bytes of a row]."""
        return self.unpack_blocks(_rows(raw, self.type.block_bytes))

    def stored(self, raw: Tensor) -> StoredBlocks:
        """Return rows, uint8 [N, bytes of a row], as blocks that a backend may unpack by itself."""
        return StoredBlocks(self.type.id, raw, self.type.block_bytes, self.factors)


@cache
def _bits_of_bytes() -> Tensor:
    """Return the 8 bits of each byte as bytes, the lowest bit first, uint8 [256, 8]."""
    bits = [[byte >> bit & 1 for bit in range(8)] for byte in range(256)]
    return torch.tensor(bits, dtype=torch.uint8, device="cpu")


def _parts(blocks: Tensor, *sizes: int) -> list[Tensor]:
    """Split each block into parts of some sizes, and copy them."""
    starts = accumulate(sizes, initial=0)
    return [blocks.narrow_copy(-1, start, size) for start, size in zip(starts, sizes, strict=False)]


def _rows(values: Tensor, width: int) -> Tensor:
    """Return values [..., R * width] as [..., R, width]."""
    return values.view(*values.shape[:-1], values.shape[-1] // width, width)


def _split(packed: Tensor, bits: int) -> Tensor:
    """Split bytes into fields of `bits` bits: [..., P] to [..., 8 / bits * P], the lowest fields of all bytes first."""
    mask = (1 << bits) - 1
    return torch.cat([(packed >> shift).bitwise_and_(mask) for shift in range(0, 8, bits)], -1)


def _joined(low: Tensor, high: Tensor, shift: int) -> Tensor:
    """Return codes [N, K] from low bits and high bits, both [N, B, ...]; both tensors are changed."""
    return low.flatten(1).bitwise_or_(high.flatten(1).bitwise_left_shift_(shift))


def _float16(part: Tensor) -> Tensor:
    """Return a two-byte part of each block as float16 [N, B]."""
    return part.view(torch.float16).squeeze(-1)


def _q4_0(blocks: Tensor) -> QuantizedRows:
    scales, codes = _parts(blocks, 2, 16)
    return QuantizedRows(_split(codes, 4).flatten(1), _float16(scales))


def _q4_1(blocks: Tensor) -> QuantizedRows:
    scales, mins, codes = _parts(blocks, 2, 2, 16)
    return QuantizedRows(_split(codes, 4).flatten(1), _float16(scales), mins=_float16(mins).neg_())


def _q5_0(blocks: Tensor) -> QuantizedRows:
    scales, high, low = _parts(blocks, 2, 4, 16)
    return QuantizedRows(_joined(_split(low, 4), _bits(high), 4), _float16(scales))


def _q5_1(blocks: Tensor) -> QuantizedRows:
    scales, mins, high, low = _parts(blocks, 2, 2, 4, 16)
    return QuantizedRows(_joined(_split(low, 4), _bits(high), 4), _float16(scales), mins=_float16(mins).neg_())


def _bits(packed: Tensor) -> Tensor:
    """Return the bits of bytes, the lowest bit of the first byte first: [..., P] to [..., P * 8]."""
    # Rows of the table are 8 bytes, and are looked up as one int64.
    table = _bits_of_bytes().view(torch.int64).squeeze(-1)
    return (
        table.index_select(0, packed.flatten().int()).view(torch.uint8).view(*packed.shape[:-1], 8 * packed.shape[-1])
    )


def _q8_0(blocks: Tensor) -> QuantizedRows:
    scales, codes = _parts(blocks, 2, 32)
    # A signed byte plus 128 is the same byte with its highest bit changed.
    return QuantizedRows(codes.flatten(1).bitwise_xor_(128), _float16(scales))


def _q2_k(blocks: Tensor) -> QuantizedRows:
    factors, codes, super_scales, super_mins = _parts(blocks, 16, 64, 2, 2)
    return QuantizedRows(
        _split(_rows(codes, 32), 2).flatten(1),
        (factors & 15).view(torch.int8).flatten(1),
        mins=(factors >> 4).flatten(1),
        super_scales=_float16(super_scales),
        super_mins=_float16(super_mins),
    )


def _q3_k(blocks: Tensor) -> QuantizedRows:
    high, low, low_scales, high_scales, super_scales = _parts(blocks, 32, 64, 8, 4, 2)
    codes = _joined(_split(_rows(low, 32), 2), _split(high, 1), 2)
    # 3-bit codes have the offset 4, but the form's 4-bit codes have the offset 8.
    codes += 4
    scales = _joined(_split(low_scales, 4), _split(high_scales, 2), 4)
    return QuantizedRows(codes, _signed(scales, 32), super_scales=_float16(super_scales))


def _q4_k(blocks: Tensor) -> QuantizedRows:
    super_scales, super_mins, factors, codes = _parts(blocks, 2, 2, 12, 128)
    return _with_mins(_split(_rows(codes, 32), 4).flatten(1), factors, super_scales, super_mins)


def _q5_k(blocks: Tensor) -> QuantizedRows:
    super_scales, super_mins, factors, high, low = _parts(blocks, 2, 2, 12, 32, 128)
    codes = _joined(_split(_rows(low, 32), 4), _split(high, 1), 4)
    return _with_mins(codes, factors, super_scales, super_mins)


def _with_mins(codes: Tensor, factors: Tensor, super_scales: Tensor, super_mins: Tensor) -> QuantizedRows:
    """Return rows of Q4_K and Q5_K: 12 bytes of a block have 8 scales and 8 minima of 6 bits."""
    # The low 6 bits of the first 8 bytes are 4 scales and 4 minima. Their high 2 bits are the high bits of the other
    # scales and minima, which have their low 4 bits in the last 4 bytes.
    first, last = factors[..., :8], factors[..., 8:]
    others = _split(last, 4) | first >> 6 << 4
    scales, mins = torch.cat([_rows(first & 63, 4), _rows(others, 4)], -1).unbind(-2)
    return QuantizedRows(
        codes,
        scales.flatten(1).view(torch.int8),
        mins=mins.flatten(1),
        super_scales=_float16(super_scales),
        super_mins=_float16(super_mins),
    )


def _q6_k(blocks: Tensor) -> QuantizedRows:
    low, high, scales, super_scales = _parts(blocks, 128, 64, 16, 2)
    codes = _joined(_split(_rows(low, 64), 4), _split(_rows(high, 32), 2), 4)
    return QuantizedRows(codes, scales.flatten(1).view(torch.int8), super_scales=_float16(super_scales))


def _iq4_xs(blocks: Tensor) -> QuantizedRows:
    super_scales, high, low, codes = _parts(blocks, 2, 2, 4, 128)
    scales = _joined(_split(low[..., None], 4), _split(high[..., None], 2), 4)
    codes = _split(_rows(codes, 16), 4).flatten(1)
    return QuantizedRows(codes, _signed(scales, 32), super_scales=_float16(super_scales))


def _mxfp4(blocks: Tensor) -> QuantizedRows:
    exponents, codes = _parts(blocks, 1, 16)
    exponents = exponents.squeeze(-1).short()
    # Half of 2^(e - 127), since levels are doubled; subnormal for e < 2.
    scales = torch.where(exponents < 2, 0x20 << exponents, (exponents - 1) << 7)
    return QuantizedRows(_split(codes, 4).flatten(1), scales.view(torch.bfloat16))


def _signed(codes: Tensor, offset: int) -> Tensor:
    """Subtract an offset from codes in place, and return them as int8."""
    return codes.sub_(offset).view(torch.int8)


BLOCK_TYPES = {
    block_type.type.id: block_type
    for block_type in (
        BlockType(types.Q4_0, WeightForm(4, 32, "float16", offset=8), slice(0, 2), _q4_0),
        BlockType(types.Q4_1, WeightForm(4, 32, "float16", has_mins=True), slice(0, 4), _q4_1),
        BlockType(types.Q5_0, WeightForm(5, 32, "float16", offset=16), slice(0, 2), _q5_0),
        BlockType(types.Q5_1, WeightForm(5, 32, "float16", has_mins=True), slice(0, 4), _q5_1),
        BlockType(types.Q8_0, WeightForm(8, 32, "float16", offset=128), slice(0, 2), _q8_0),
        BlockType(types.Q2_K, WeightForm(4, 16, "two_level", has_mins=True), slice(80, 84), _q2_k),
        BlockType(types.Q3_K, WeightForm(4, 16, "two_level", offset=8), slice(108, 110), _q3_k),
        BlockType(types.Q4_K, WeightForm(4, 32, "two_level", has_mins=True), slice(0, 4), _q4_k),
        BlockType(types.Q5_K, WeightForm(5, 32, "two_level", has_mins=True), slice(0, 4), _q5_k),
        BlockType(types.Q6_K, WeightForm(6, 16, "two_level", offset=32), slice(208, 210), _q6_k),
        BlockType(types.IQ4_NL, WeightForm(4, 32, "float16", levels=IQ4_LEVELS), slice(0, 2), _q4_0),
        BlockType(types.IQ4_XS, WeightForm(4, 32, "two_level", levels=IQ4_LEVELS), slice(0, 2), _iq4_xs),
        BlockType(types.MXFP4, WeightForm(4, 32, "bfloat16", levels=MXFP4_LEVELS), slice(0, 0), _mxfp4),
    )
}
