"""Linear layers on rounded weights, compiled."""

from __future__ import annotations

from torch import Tensor

from quire.ops.native_library import TYPES, WeightKernels
from quire.ops.weight_memory import WeightMemory


class NativeQuantisedLinear:
    """A product of rows of int8 and weights of few bits; bias and residual are added before the one rounding.

    A row gets the same bits whatever rows are beside it.
    """

    __slots__ = ("_bias", "_multiply", "_num_columns", "_packed", "_width")

    def __init__(self, kernels: WeightKernels, memory: WeightMemory, weight: Tensor, bias: Tensor | None) -> None:
        weight = weight.contiguous()
        self._num_columns, self._width = weight.shape
        self._multiply = kernels.multiply
        self._packed = memory.take(kernels.num_bytes(self._num_columns, self._width))
        self._bias = None if bias is None else bias.contiguous()
        kernels.pack(TYPES[weight.dtype], weight.data_ptr(), self._num_columns, self._width, self._packed.data_ptr())

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Round the rows, multiply and add in one call."""
        num_rows = x.shape[0]
        output = x.new_empty(num_rows, self._num_columns)
        self._multiply(
            TYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            num_rows,
            self._packed.data_ptr(),
            self._num_columns,
            self._width,
            None if self._bias is None else self._bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            output.data_ptr(),
        )
        return output
