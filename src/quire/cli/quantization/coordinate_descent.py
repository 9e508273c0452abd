"""Calibrated rounding: codes and scales that change a layer's outputs least, found by cyclic coordinate descent.

The error of W' as a quantisation of a weight W [N, K] is |X @ W.T - X' @ W'.T|^2, where X are the inputs of the layer
and X' the inputs of the same rows in the quantised model. It is a quadratic function of each scale and of each value,
so each is set to its optimum while all others are fixed, group by group. Rows of W are independent of each other.

Sources: QuantEase, arXiv 2309.01885 (descent over values); GPTAQ, arXiv 2504.02692 (inputs of the quantised model).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from quire.cli.quantization.rounding import SHRINKS, Factors, QuantizedMatrix, Scheme, fit

# Share of the mean diagonal that is added to the diagonal, so that inputs that are rare in the text count too.
DAMPING: Final = 0.01
# Number of rounds over all inputs; more change little.
SWEEPS: Final = 6


def quantize(weight: Tensor, gram: Tensor, cross: Tensor, scheme: Scheme) -> QuantizedMatrix:
    """Quantise a weight for the inputs of its layer."""
    mean = gram.diagonal().mean()
    damping = torch.eye(len(gram)) * (DAMPING * mean if mean > 0 else 1.0)
    gram, cross = gram + damping, cross + damping
    groups = weight.view(len(weight), -1, scheme.group_size or weight.shape[1])
    factors = fit(groups, scheme, SHRINKS, gram.diagonal().view(groups.shape[1:]))
    codes = factors.codes(groups, scheme)
    # Half of the negative gradient with respect to the values.
    slopes = (weight @ cross).addmm_(factors.values(codes).view(weight.shape), gram, alpha=-1)
    for _ in range(SWEEPS):
        for idx in range(groups.shape[1]):
            columns = slice(idx * groups.shape[2], (idx + 1) * groups.shape[2])
            group = _Group(codes[:, idx], Factors(*(part[:, idx] for part in factors)), slopes[:, columns])
            change = group.improve(gram[columns, columns], scheme)
            codes[:, idx], factors.scales[:, idx] = group.codes.t(), group.factors.scales
            slopes.addmm_(change, gram[columns], alpha=-1)
    return QuantizedMatrix(codes.to(torch.uint8).view(weight.shape), factors)


class _Group:
    """The codes of one group of all rows, transposed."""

    def __init__(self, codes: Tensor, factors: Factors, slopes: Tensor) -> None:
        self.codes, self.factors = codes.t().contiguous(), factors
        self._slopes = slopes.t().contiguous()

    def improve(self, gram: Tensor, scheme: Scheme) -> Tensor:
        """Set the scales, then each code, to their optima, and return the change of the values, [N, G]."""
        levels = self.codes - self.factors.zero_points
        before = levels * self.factors.scales.float()
        curvature = (gram @ levels).mul_(levels).sum(0)
        scales = self.factors.scales + (levels * self._slopes).sum(0) / curvature.clamp_(min=1e-30)
        # A group of zeros has no curvature, and its scale has no optimum.
        best = torch.where((curvature > 1e-30) & (scales > 0), scales, self.factors.scales.float())
        best = best.to(scheme.scale_dtype)
        self.factors = Factors(torch.where(best > 0, best, self.factors.scales), self.factors.zero_points)
        scales, zero_points, most = self.factors.scales.float(), self.factors.zero_points, (1 << scheme.bits) - 1
        values = levels * scales
        slopes = self._slopes.addmm_(gram, values - before, alpha=-1)
        steps, weights = slopes.unbind(), gram.unbind()
        for column, (value, code) in enumerate(zip(values.unbind(), self.codes.unbind(), strict=True)):
            target = (value + steps[column] / gram[column, column]).div_(scales)
            torch.clamp(target.round_().add_(zero_points), 0, most, out=code)
            change = (code - zero_points).mul_(scales).sub_(value)
            value += change
            slopes.addr_(weights[column], change, alpha=-1)
        return (values - before).t()
