"""A linear layer whose weight has its input columns in another order."""

from __future__ import annotations

from torch import Tensor

from quire.ops.interface.ops import Linear


class ReorderedLinear:
    """A linear layer whose weight has permuted input columns, as GPTQ sorts them by importance (act-order)."""

    __slots__ = ("_input_order", "_linear")

    def __init__(self, linear: Linear, input_order: Tensor) -> None:
        self._linear = linear
        self._input_order = input_order

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Reorder the columns of `x` [T, K], then multiply."""
        return self._linear(x.index_select(1, self._input_order), residual)
