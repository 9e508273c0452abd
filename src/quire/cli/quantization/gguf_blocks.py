"""Quantisation of values to the block types of GGUF: the inverse of `quire.models.gguf.block_types`.

Block types of 32 values are rounded as by llama.cpp's reference implementation. For block types of 256 values, scales
and minima are found by least squares, over the codes of several candidate ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from quire.models.gguf import tensor_types as types
from quire.models.gguf.block_types import PLAIN_DTYPES
from quire.models.gguf.tensor_types import TensorType
from quire.ops.interface.quantized_weight import chunks

# Candidate additions to the number of levels into which a group's range is divided.
TRIALS: Final = tuple(step / 4 for step in range(-4, 5))


def pack_rows(kind: TensorType, values: Tensor) -> Tensor:
    """Return the rows of a tensor in a block type, uint8 [N, bytes of a row]."""
    if kind.id in PLAIN_DTYPES:
        return values.to(PLAIN_DTYPES[kind.id]).contiguous().view(torch.uint8)
    num_rows, width = values.shape
    packed = torch.empty(num_rows, width // kind.block_values * kind.block_bytes, dtype=torch.uint8)
    for rows in chunks(num_rows, width, num_codes=1 << 20):
        blocks = values[rows].float().view(-1, width // kind.block_values, kind.block_values)
        packed[rows] = PACKERS[kind](blocks).flatten(1)
    return packed


def _divide(values: Tensor, *sizes: int) -> Tensor:
    """Return values with their last dimension divided into dimensions of these sizes."""
    return values.view(*values.shape[:-1], *sizes)


def _bytes(values: Tensor) -> Tensor:
    """Return the bytes of values [..., P] in float16."""
    return values.half().contiguous().view(torch.uint8)


def _halves(codes: Tensor) -> Tensor:
    """Pack 4-bit codes [..., 2 P], the first half in the low bits."""
    low, high = (codes & 15).chunk(2, -1)
    return low | high << 4


def _fields(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [..., 8 / bits, P] of `bits` bits, with the first row in the lowest bits."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return (codes << shifts).sum(-2, dtype=torch.uint8)


def _divided(values: Tensor, by: Tensor) -> Tensor:
    """Return values times the reciprocal of each group's divisor, 0 for a divisor of 0."""
    return values * torch.where(by == 0, 0.0, 1 / by)


def _symmetric(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return scales [N, B, 1] and codes; the value of the largest magnitude gets the lowest code."""
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scales, half = largest / -(1 << bits - 1), 1 << bits - 1
    codes = (_divided(blocks, scales) + (half + 0.5)).trunc_().clamp_(0, 2 * half - 1)
    return scales, codes.to(torch.uint8)


def _affine(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales, minima [N, B, 1] and codes, over the range of each block."""
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    levels = (1 << bits) - 1
    scales = (high - low) / levels
    codes = (_divided(blocks - low, scales) + 0.5).trunc_().clamp_(0, levels)
    return scales, low, codes.to(torch.uint8)


def _q4_0(blocks: Tensor) -> Tensor:
    scales, codes = _symmetric(blocks, 4)
    return torch.cat([_bytes(scales), _halves(codes)], -1)


def _q4_1(blocks: Tensor) -> Tensor:
    scales, low, codes = _affine(blocks, 4)
    return torch.cat([_bytes(scales), _bytes(low), _halves(codes)], -1)


def _q5_0(blocks: Tensor) -> Tensor:
    scales, codes = _symmetric(blocks, 5)
    return torch.cat([_bytes(scales), _fifth_bits(codes), _halves(codes)], -1)


def _q5_1(blocks: Tensor) -> Tensor:
    scales, low, codes = _affine(blocks, 5)
    return torch.cat([_bytes(scales), _bytes(low), _fifth_bits(codes), _halves(codes)], -1)


def _fifth_bits(codes: Tensor) -> Tensor:
    """Pack the fifth bits of codes [..., 32] into 4 bytes, the first in the lowest bit."""
    return _fields(_divide(codes >> 4, 4, 8).mT, 1)


def _q8_0(blocks: Tensor) -> Tensor:
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    quotients = _divided(blocks, scales)
    # Halves are rounded away from zero.
    codes = (quotients.abs() + 0.5).floor_().copysign_(quotients)
    return torch.cat([_bytes(scales), codes.to(torch.int8).view(torch.uint8)], -1)


def _q4_k(blocks: Tensor) -> Tensor:
    factors, codes = _with_mins(blocks, 4)
    return torch.cat([factors, _nibbles(codes)], -1)


def _q5_k(blocks: Tensor) -> Tensor:
    factors, codes = _with_mins(blocks, 5)
    return torch.cat([factors, _fields(codes >> 4, 1), _nibbles(codes)], -1)


def _nibbles(codes: Tensor) -> Tensor:
    """Pack the low bits of codes [N, B, 8, 32]: bytes of the first two groups, then of the next two, ..."""
    return _fields(_divide((codes & 15).flatten(-2), 4, 2, 32), 4).flatten(-2)


def _with_mins(blocks: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the 16 bytes of scales and minima of blocks [N, B, 256], and the codes [N, B, 8, 32]."""
    groups, levels = _divide(blocks, 8, 32), (1 << bits) - 1
    scales, mins = _fit_affine(groups, levels)
    super_scales, scale_codes = _super_scaled(scales, 63)
    super_mins, min_codes = _super_scaled(mins, 63)
    scales, mins = super_scales.float() * scale_codes, super_mins.float() * min_codes
    codes = _divided(groups + mins[..., None], scales[..., None]).round_().clamp_(0, levels).to(torch.uint8)
    first = _divide(torch.cat([scale_codes, min_codes], -1).to(torch.uint8), 2, 2, 4)
    (low_scales, high_scales), (low_mins, high_mins) = (part.unbind(-2) for part in first.unbind(-3))
    packed = [low_scales | high_scales >> 4 << 6, low_mins | high_mins >> 4 << 6, high_scales & 15 | high_mins << 4]
    return torch.cat([_bytes(super_scales), _bytes(super_mins), *packed], -1), codes


def _super_scaled(scales: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the float16 scale [N, B, 1] of scales [N, B, G], and their codes, whole numbers up to `most`."""
    super_scales = (scales.abs().amax(-1, keepdim=True) / most).half()
    return super_scales, _divided(scales, super_scales.float()).round_().clamp_(-most, most)


def _q6_k(blocks: Tensor) -> Tensor:
    groups = _divide(blocks, 16, 16)
    super_scales, scale_codes = _super_scaled(_fit_symmetric(groups), 127)
    scales = super_scales.float() * scale_codes
    codes = _divided(groups, scales[..., None]).round_().clamp_(-32, 31).add_(32).to(torch.uint8)
    codes = _divide(codes.flatten(-2), 2, 4, 32)
    # In each half of a block, the first two groups of 32 codes are in lower bits than the other two.
    low = _halves(codes.flatten(-2)).flatten(-2)
    high = _fields(codes >> 4, 2).flatten(-2)
    return torch.cat([low, high, scale_codes.to(torch.int8).view(torch.uint8), _bytes(super_scales)], -1)


def _fit_affine(groups: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return scales and minima [...] of groups [..., G], both at least 0: values are scale * code - minimum."""
    low, high = groups.amin(-1, keepdim=True).clamp_(max=0.0), groups.amax(-1, keepdim=True)
    best = best_errors = None
    mean = groups.mean(-1)
    for trial in TRIALS:
        codes = _divided(groups - low, (high - low) / (levels + trial)).round_().clamp_(0, levels)
        mean_code, squares = codes.mean(-1), codes.square().mean(-1)
        products = (codes * groups).mean(-1)
        scales = (products - mean_code * mean) / (squares - mean_code.square()).clamp_(min=1e-12)
        mins = scales * mean_code - mean
        # No minimum if the optimum is below zero.
        scales = torch.where(mins < 0, products / squares.clamp(min=1e-12), scales).clamp_(min=0)
        mins.clamp_(min=0)
        errors = (codes * scales[..., None] - mins[..., None] - groups).square_().sum(-1)
        best, best_errors = _better(best, best_errors, torch.stack([scales, mins]), errors)
    assert best is not None
    return best[0], best[1]


def _fit_symmetric(groups: Tensor) -> Tensor:
    """Return the scales [...] of groups [..., G] with codes from -32 to 31."""
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best = best_errors = None
    for trial in TRIALS:
        codes = _divided(groups, largest / -(32 + trial)).round_().clamp_(-32, 31)
        scales = (codes * groups).sum(-1) / codes.square().sum(-1).clamp_(min=1e-12)
        errors = (codes * scales[..., None] - groups).square_().sum(-1)
        best, best_errors = _better(best, best_errors, scales, errors)
    assert best is not None
    return best


def _better(best: Tensor | None, best_errors: Tensor | None, other: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each group the factors with the smaller error, and this error."""
    if best is None or best_errors is None:
        return other, errors
    return torch.where(errors < best_errors, other, best), torch.minimum(errors, best_errors)


PACKERS: Final[Mapping[TensorType, Callable[[Tensor], Tensor]]] = {
    types.Q4_0: _q4_0,
    types.Q4_1: _q4_1,
    types.Q5_0: _q5_0,
    types.Q5_1: _q5_1,
    types.Q8_0: _q8_0,
    types.Q4_K: _q4_k,
    types.Q5_K: _q5_k,
    types.Q6_K: _q6_k,
}
