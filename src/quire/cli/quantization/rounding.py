"""Quantisation of the weights of linear layers to integer codes with scales, group by group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

# Candidate factors of a group's range; the factor with the least error is used.
SHRINKS: Final = tuple(1 - step / 32 for step in range(13))


class Scheme(NamedTuple):
    """The form of the codes of a layer.

    Args:
        bits: number of bits of a code, 4 or 8.
        group_size: number of inputs that share a scale; None for one scale per output.
        symmetric: False for one zero point per scale.
        scale_dtype: dtype of the scales.
    """

    bits: int
    group_size: int | None
    symmetric: bool
    scale_dtype: torch.dtype

    @property
    def offset(self) -> int:
        """The code of zero in schemes without zero points."""
        return 1 << (self.bits - 1)


class Factors(NamedTuple):
    """The scales of groups, and their zero points.

    Args:
        scales: [...] of the scheme's dtype, positive.
        zero_points: float32 [...], integers.
    """

    scales: Tensor
    zero_points: Tensor

    def codes(self, values: Tensor, scheme: Scheme) -> Tensor:
        """Return the codes of values [..., G], integers from 0 in float32."""
        codes = (values / self.scales.float()[..., None]).round_().add_(self.zero_points[..., None])
        return codes.clamp_(0, (1 << scheme.bits) - 1)

    def values(self, codes: Tensor) -> Tensor:
        """Return the values of codes [..., G], float32."""
        return (codes - self.zero_points[..., None]) * self.scales.float()[..., None]


class QuantizedMatrix(NamedTuple):
    """A quantised weight [N, K], with K / G groups.

    Args:
        codes: uint8 [N, K].
        factors: scales and zero points [N, K / G].
    """

    codes: Tensor
    factors: Factors

    def dequantize(self) -> Tensor:
        """Return the values, float32 [N, K]."""
        codes = self.codes.float().view(*self.factors.scales.shape, -1)
        return self.factors.values(codes).view(self.codes.shape)

    def split(self, sizes: Sequence[int]) -> list[QuantizedMatrix]:
        """Split the rows into parts."""
        codes, scales, zero_points = (torch.split(part, list(sizes)) for part in (self.codes, *self.factors))
        parts = zip(codes, map(Factors, scales, zero_points), strict=True)
        return [QuantizedMatrix(*part) for part in parts]


def fit(values: Tensor, scheme: Scheme, shrinks: Sequence[float] = (1.0,), importance: Tensor | None = None) -> Factors:
    """Return the factors of groups: for each, the candidate range with the least (weighted) squared error."""
    best, best_errors = _factors(values, scheme, shrinks[0]), None
    if len(shrinks) == 1:
        return best
    for shrink in shrinks:
        factors = _factors(values, scheme, shrink)
        errors = (factors.values(factors.codes(values, scheme)) - values).square_()
        errors = (errors if importance is None else errors * importance).sum(-1)
        if best_errors is None:
            best, best_errors = factors, errors
        else:
            is_better = errors < best_errors
            best = Factors(*(torch.where(is_better, new, old) for new, old in zip(factors, best, strict=True)))
            best_errors = torch.minimum(errors, best_errors)
    return best


def round_to_nearest(weight: Tensor, scheme: Scheme) -> QuantizedMatrix:
    """Round each value to the nearest code; the range of a group is the range of its values."""
    groups = weight.view(len(weight), -1, scheme.group_size or weight.shape[1])
    factors = fit(groups, scheme)
    return QuantizedMatrix(factors.codes(groups, scheme).to(torch.uint8).view(weight.shape), factors)


def _factors(values: Tensor, scheme: Scheme, shrink: float) -> Factors:
    levels = (1 << scheme.bits) - 1
    if scheme.symmetric:
        # Codes have one more level below zero than above, so half a level is clipped at the upper end.
        scales = values.abs().amax(-1) * (2 * shrink / levels)
    else:
        low, high = values.amin(-1).clamp_(max=0.0), values.amax(-1).clamp_(min=0.0)
        scales = (high - low) * (shrink / levels)
    scales = scales.to(scheme.scale_dtype)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    if scheme.symmetric:
        return Factors(scales, torch.full_like(scales, scheme.offset, dtype=torch.float32))
    return Factors(scales, (low * -shrink / scales.float()).round_().clamp_(0, levels))
