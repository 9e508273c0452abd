"""Linear layers on rounded weights, compiled."""

from __future__ import annotations

from torch import Tensor

from quire.ops.interface import Activation
from quire.ops.native_library import ACTIVATIONS, TYPES, WeightKernels
from quire.ops.weight_memory import WeightMemory


class NativeQuantisedLinear:
    """A product of rows of int8 and weights of few bits; bias and residual are added before the one rounding.

    A row gets the same bits whatever rows are beside it.

    Args:
        gate: see `Ops.pack_linear`.
    """

    __slots__ = ("_bias", "_gate", "_multiply", "_num_columns", "_num_outputs", "_packed", "_width")

    def __init__(
        self,
        kernels: WeightKernels,
        memory: WeightMemory,
        weight: Tensor,
        bias: Tensor | None,
        gate: Activation | None = None,
    ) -> None:
        weight = weight.contiguous()
        self._num_columns, self._width = weight.shape
        self._multiply = kernels.multiply
        self._packed = memory.take(kernels.num_bytes(self._num_columns, self._width))
        self._bias = None if bias is None else bias.contiguous()
        self._gate, self._num_outputs = ACTIVATIONS[gate], self._num_columns // (1 if gate is None else 2)
        shape = (self._num_columns, self._width)
        kernels.pack(TYPES[weight.dtype], weight.data_ptr(), *shape, gate is not None, self._packed.data_ptr())

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Round the rows, multiply and add in one call."""
        num_rows = x.shape[0]
        output = x.new_empty(num_rows, self._num_outputs)
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
            self._gate,
            output.data_ptr(),
        )
        return output
