"""Linear layers on bfloat16 weights that are packed to three quarters of their bytes and keep every bit."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.interface import Activation
from quire.ops.native_library import ACTIVATIONS, LosslessCalls
from quire.ops.weight_memory import WeightMemory

PANEL_COLUMNS, BLOCK_WIDTH, TABLE_BYTES = 64, 32, 16


class LosslessPacking:
    """Packs weights, and counts what that saves.

    Args:
        calls: of a library that packs so.

    Attributes:
        plain_bytes, packed_bytes: of all weights packed so far; the latter with tables and places.
    """

    def __init__(self, calls: LosslessCalls) -> None:
        self._calls = calls
        self.plain_bytes = self.packed_bytes = 0

    def __str__(self) -> str:
        """Return what is reached, for people."""
        return f"weights packed lossless to {self.packed_bytes / self.plain_bytes:.1%}"

    def pack(
        self, memory: WeightMemory, weight: Tensor, bias: Tensor | None, gate: Activation | None = None
    ) -> LosslessLinear:
        """Pack a weight [out, in] of bfloat16, `in` even; `gate` as in `Ops.pack_linear`."""
        linear = LosslessLinear(self._calls, memory, weight, bias, gate)
        self.plain_bytes += weight.nbytes
        self.packed_bytes += linear.num_bytes
        return linear


class LosslessLinear:
    """A product on panels of 64 columns in packed blocks, with the bits that `NativeLinear` gives.

    Attributes:
        num_bytes: of the packed weight.
    """

    __slots__ = (
        "_bias",
        "_data",
        "_gate",
        "_look_up",
        "_multiply",
        "_num_columns",
        "_num_outputs",
        "_starts",
        "_tables",
        "_width",
        "num_bytes",
    )

    def __init__(
        self,
        calls: LosslessCalls,
        memory: WeightMemory,
        weight: Tensor,
        bias: Tensor | None,
        gate: Activation | None = None,
    ) -> None:
        weight = weight.contiguous()
        self._num_columns, self._width = weight.shape
        self._multiply, self._look_up = calls.linear, calls.rows
        self._bias = None if bias is None else bias.contiguous()
        num_panels, num_blocks = -(-self._num_columns // PANEL_COLUMNS), -(-self._width // BLOCK_WIDTH)
        self._tables = torch.empty(num_panels, num_blocks, TABLE_BYTES, dtype=torch.uint8)
        self._starts = torch.zeros(num_panels + 1, dtype=torch.int64)
        self._gate, self._num_outputs = ACTIVATIONS[gate], self._num_columns // (1 if gate is None else 2)
        what = (weight.data_ptr(), self._num_columns, self._width, gate is not None)
        calls.tables(*what, self._tables.data_ptr(), self._starts[1:].data_ptr())
        self._starts.cumsum_(0)
        self._data = memory.take(int(self._starts[-1]))
        places = (self._tables.data_ptr(), self._starts.data_ptr(), self._data.data_ptr())
        calls.pack(*what, *places)
        self.num_bytes = self._tables.nbytes + self._starts.nbytes + self._data.nbytes

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply and add in one call."""
        num_rows = x.shape[0]
        output = x.new_empty(num_rows, self._num_outputs)
        self._multiply(
            x.data_ptr(),
            x.stride(0),
            num_rows,
            self._tables.data_ptr(),
            self._starts.data_ptr(),
            self._data.data_ptr(),
            self._num_columns,
            self._width,
            None if self._bias is None else self._bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            self._gate,
            output.data_ptr(),
        )
        return output

    def rows(self, ids: Tensor) -> Tensor:
        """Look up rows of the weight: ids [T] to [T, in]; an IndexError for one that there is not."""
        output = torch.empty(len(ids), self._width, dtype=torch.bfloat16)
        ids = ids.contiguous()
        places = (self._tables.data_ptr(), self._starts.data_ptr(), self._data.data_ptr())
        shape = (self._num_columns, self._width)
        if not self._look_up(*places, *shape, ids.data_ptr(), len(ids), output.data_ptr()):
            raise IndexError(f"rows are from 0 to {self._num_columns - 1}, got ids from {ids.min()} to {ids.max()}")
        return output
