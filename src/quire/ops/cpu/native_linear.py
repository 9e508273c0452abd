"""Linear layers with native kernels: one class for all weight formats."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from quire.ops.cpu.native_library import ACTIVATIONS, TYPES, LosslessKernels, PlainKernels, RoundedKernels
from quire.ops.cpu.native_quantized import QuantizedKernels
from quire.ops.cpu.native_structures import LinearCall
from quire.ops.interface.ops import Activation
from quire.ops.interface.quantized_weight import StoredWeight
from quire.ops.interface.weight_memory import WeightMemory


class NativeLinear:
    """A matmul with a packed weight; bias and residual are added in the epilogue, before the only rounding.

    It is batch-invariant: a row gets the same bits in every batch.

    Args:
        kernels: kernels of the weight's format.
        memory: memory of packed weights.
        weight: [out, in], of the dtype of the activations; a stored quantised weight for `QuantizedKernels`.
        bias: [out], of the dtype of the activations.
        gate, num_slices: see `Ops.pack_linear`.
    """

    __slots__ = (
        "_bias",
        "_dtype",
        "_gate",
        "_kept",
        "_kernels",
        "_weight",
        "num_bytes",
        "num_outputs",
        "rounds_inputs",
    )

    def __init__(
        self,
        kernels: PlainKernels | RoundedKernels | LosslessKernels | QuantizedKernels,
        memory: WeightMemory,
        weight: Tensor | StoredWeight,
        bias: Tensor | None,
        gate: Activation | None = None,
        num_slices: int = 1,
    ) -> None:
        self._kernels, self._dtype = kernels, weight.dtype
        pack: Any = kernels.pack_weight
        weight = weight if isinstance(weight, StoredWeight) else weight.contiguous()
        tensors = pack(memory, weight, gate is not None, num_slices)
        rounds = weight.rounds_inputs if isinstance(weight, StoredWeight) else isinstance(kernels, RoundedKernels)
        self.rounds_inputs = rounds and bias is None
        self._weight = (tensors[0].data_ptr(), *weight.shape)
        bias = None if bias is None else bias.contiguous()
        self._kept, self._bias = (tensors, bias), None if bias is None else bias.data_ptr()
        self._gate, self.num_outputs = ACTIVATIONS[gate], weight.shape[0] // (1 if gate is None else 2)
        self.num_bytes = sum(tensor.nbytes for tensor in tensors)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply, add bias and residual, and gate, in one call."""
        output = x.new_empty(x.shape[0], self.num_outputs)
        rows = TYPES[x.dtype], x.data_ptr(), x.stride(0), x.shape[0]
        added = None if residual is None else residual.data_ptr()
        self._kernels.multiply(*rows, *self._weight, self._bias, added, self._gate, output.data_ptr())
        return output

    def as_call(self) -> LinearCall:
        """Return the layer's structure for fused layers; it is valid as long as the layer lives."""
        kernel: Any = self._kernels.multiply
        return LinearCall(ctypes.cast(kernel, ctypes.c_void_p), *self._weight, self._bias, self._gate)


class ExactNativeLinear(NativeLinear):
    """A native linear layer whose format is lossless, so that rows of the weight can be looked up (tied embeddings)."""

    __slots__ = ()

    def rows(self, ids: Tensor) -> Tensor:
        """Look up rows of the weight: ids [T] to [T, in]."""
        num_columns, width = self._weight[-2:]
        output, ids = torch.empty(len(ids), width, dtype=self._dtype), ids.contiguous()
        assert not isinstance(self._kernels, RoundedKernels)
        if not self._kernels.rows(TYPES[self._dtype], *self._weight, ids.data_ptr(), len(ids), output.data_ptr()):
            raise IndexError(f"rows are from 0 to {num_columns - 1}, got ids from {ids.min()} to {ids.max()}")
        return output
