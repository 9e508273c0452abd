"""A linear layer whose outputs come from several weights: some stored quantised, some unquantised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from quire.ops.interface.ops import Linear
from quire.ops.interface.quantized_weight import PlainWeight, QuantizedWeight, StoredWeight


class JoinedLinear:
    """The outputs of some linear layers, concatenated along columns."""

    __slots__ = ("_linears", "_num_columns")

    def __init__(self, linears: Sequence[Linear], num_columns: list[int]) -> None:
        self._linears, self._num_columns = linears, num_columns

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Run each layer, and concatenate the outputs."""
        if residual is None:
            return torch.cat([linear(x) for linear in self._linears], -1)
        parts = torch.split(residual, self._num_columns, -1)
        return torch.cat([linear(x, part.contiguous()) for linear, part in zip(self._linears, parts, strict=True)], -1)


def pack_joined(
    pack: Callable[[Tensor | StoredWeight, Tensor | None], Linear], weight: StoredWeight, bias: Tensor | None
) -> JoinedLinear:
    """Pack adjacent quantised parts together, and each unquantised part separately."""
    weights: list[Tensor | StoredWeight] = []
    for is_plain, parts in groupby(weight.parts, lambda part: isinstance(part, PlainWeight)):
        if is_plain:
            weights += [part.values for part in parts if isinstance(part, PlainWeight)]
        else:
            quantized = tuple(part for part in parts if isinstance(part, QuantizedWeight))
            weights.append(StoredWeight(quantized, weight.dtype))
    num_columns = [matrix.shape[0] for matrix in weights]
    biases: Sequence[Tensor | None] = [None] * len(weights) if bias is None else torch.split(bias, num_columns)
    return JoinedLinear([pack(matrix, part) for matrix, part in zip(weights, biases, strict=True)], num_columns)
