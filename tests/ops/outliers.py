"""Activations with outliers as real models have them, and what rounding them in groups costs.

In the published models that were looked at, the largest input of a down projection is about 20 times the spread of its
row, those of other projections 13 to 15 times; rows of models with random weights have none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from quire.config import Quantization
from quire.measurement.bench.exact_ops import ExactOps
from quire.ops.interface.ops import Activation, KeepsRows, Linear
from quire.ops.interface.quantized_weight import QuantizedWeight, StoredWeight
from quire.ops.interface.weight_formats import FORMS, weight_format
from quire.ops.layers.gated import GatedLinear
from quire.ops.pytorch.torch_ops import TorchOps
from tests.ops.world import randn

# Factor of the channels that stand out, and one channel in this many does.
OUTLIER: Final = 20.0
EVERY: Final = 193
# Inputs that share a scale of activations where weights are stored, and the loss that is allowed in addition to that of
# rounding them.
GROUP: Final = 32
MARGIN: Final = 1.1


def outlier_rows(num_rows: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return rows [T, E] of normal values, of which some channels have 20 times the spread."""
    x = randn(num_rows, width, seed=seed)
    x[:, 5::EVERY] *= OUTLIER
    return x.to(dtype)


def round_in_groups(x: Tensor, group: int = GROUP) -> Tensor:
    """Return the values of rows [T, E] that were rounded to int8, by the largest magnitude of each group."""
    groups = x.float().reshape(len(x), -1, min(group, x.shape[-1]))
    scales = groups.abs().amax(-1, keepdim=True) / 127.0
    return (torch.where(scales > 0, groups / scales, 0.0).round() * scales).reshape(x.shape)


def rms(x: Tensor) -> float:
    """Return the root mean square of all values."""
    return x.double().square().mean().sqrt().item()


class GroupedLinear:
    """A layer whose inputs are rounded in groups.

    Args:
        linear: exact layer.
        order: int64 [K], order in which inputs are grouped; None for their own.
        group: inputs that share a scale.
    """

    def __init__(self, linear: Linear, order: Tensor | None = None, group: int = GROUP) -> None:
        self._linear, self._order, self._group = linear, order, group

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Round and multiply."""
        if self._order is None:
            return self._linear(round_in_groups(x, self._group), residual)
        rounded = round_in_groups(x[:, self._order], self._group)
        return self._linear(torch.empty_like(rounded).index_copy_(1, self._order, rounded), residual)


class GroupedStoredLinear(GroupedLinear):
    """The same for a weight that is stored quantised, whose rows can be looked up."""

    def __init__(self, linear: Linear, order: Tensor | None) -> None:
        super().__init__(linear, order)
        assert isinstance(linear, KeepsRows)
        self.rows = linear.rows


class RoundedOps(ExactOps):
    """Exact products with weights as they are stored, or as an option rounds them.

    Args:
        quantization: rounding of plain weights.
        is_grouped: whether inputs of quantised weights are rounded in groups, of 32 where the weight is stored, else
            of those of its form: the straightforward arithmetic of eight bits, whose loss is the measure of kernels.
    """

    def __init__(self, quantization: Quantization | None = None, *, is_grouped: bool = False) -> None:
        super().__init__()
        self._rounding, self._is_grouped = quantization, is_grouped

    def pack_linear(
        self,
        weight: Tensor | StoredWeight,
        bias: Tensor | None = None,
        min_bits: int = 4,
        gate: Activation | None = None,
        num_slices: int = 1,  # noqa: ARG002 (no order of sums is promised)
        max_group: int = 32,
    ) -> Linear:
        """Dequantise."""
        if gate is not None:
            return GatedLinear(self.pack_linear(weight, bias, min_bits, max_group=max_group), self.gate, gate)
        if isinstance(weight, StoredWeight):
            linear = super().pack_linear(weight, bias, min_bits)
            rounds = any(part.form.levels != "e4m3" for part in weight.quantized)
            return GroupedStoredLinear(linear, weight.input_order) if rounds and self._is_grouped else linear
        chosen = weight_format(self._rounding, min_bits, max_group)
        if chosen is None:
            return super().pack_linear(weight, bias, min_bits)
        # Rows of the identity are rounded to themselves, so their products are the dequantised weights.
        rounding = TorchOps(torch.device("cpu"), quantization=self._rounding)
        stock = rounding.pack_linear(weight, min_bits=min_bits, max_group=max_group)
        values = stock(torch.eye(weight.shape[1])).T.contiguous()
        linear = super().pack_linear(values, bias)
        return GroupedLinear(linear, group=FORMS[chosen].group) if self._is_grouped else linear


def amplified(weight: QuantizedWeight) -> QuantizedWeight:
    """Return a weight some of whose rows are 20 times as large: its products have outliers."""
    rows = weight.read(slice(None))

    def larger(field: Tensor) -> Tensor:
        field = field.clone()
        field[5::EVERY] *= OUTLIER
        return field

    if rows.super_scales is None:
        rows = rows._replace(scales=larger(rows.scales), mins=None if rows.mins is None else larger(rows.mins))
    else:
        super_mins = None if rows.super_mins is None else larger(rows.super_mins)
        rows = rows._replace(super_scales=larger(rows.super_scales), super_mins=super_mins)
    return replace(weight, read=rows.at)
