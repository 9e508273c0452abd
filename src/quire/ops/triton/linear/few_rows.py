"""GEMV: matmuls of one or two rows with plain 16-bit weights, by a kernel that is bound by memory bandwidth."""

from __future__ import annotations

from typing import Final, NamedTuple

from torch import Tensor

from quire.ops.interface.ops import Activation
from quire.ops.triton.kernels import few_rows as kernels
from quire.ops.triton.launches import ACTIVATIONS, Device, is_aligned

# Maximum number of rows; from three on, tensor cores are as fast or faster.
MOST_ROWS: Final = 2
# Up to this number of columns there are few programs, so each has more loads in flight.
FEW_COLUMNS: Final = 2048
# Above MANY_COLUMNS, a program has more columns; from MANY_INPUTS on, a gated program loads more inputs at once.
MANY_COLUMNS: Final = 4096
MANY_INPUTS: Final = 4096


class FewRowsTile(NamedTuple):
    """The sizes of a program that were fastest on an H200.

    Args:
        columns: number of columns of the output.
        inputs: number of inputs per iteration.
        num_warps: number of warps.
    """

    columns: int
    inputs: int
    num_warps: int

    @staticmethod
    def of(num_rows: int, num_columns: int, width: int, is_gated: bool) -> FewRowsTile | None:
        """Return the tile for a matmul of `num_rows` rows [R, width]; None if the kernel does not support it."""
        columns, inputs, num_warps = 4, 512, 4
        if num_columns <= FEW_COLUMNS:
            inputs = 1024
        elif num_rows == 2:
            columns, inputs, num_warps = 4 if is_gated else 8, 256, 2
        elif is_gated and width >= MANY_INPUTS:
            columns, inputs = 2, 1024
        elif not is_gated and num_columns > MANY_COLUMNS:
            columns = 8
        inputs = min(inputs, width & -width)
        if num_rows > MOST_ROWS or num_columns % columns or inputs < 128:
            return None
        return FewRowsTile(columns, inputs, num_warps)


def is_readable(weight: Tensor) -> bool:
    """Return whether the kernel can read a weight: 16-bit and aligned; the shape is not checked."""
    return weight.itemsize == 2 and is_aligned(weight)


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: Activation | None,
    tile: FewRowsTile,
    device: Device,
) -> Tensor:
    """Multiply rows [R, in] by a weight [out, in]; return [R, out], or if gated [R, out / 2].

    Args:
        bias: [out], or None.
        residual: [R, out], contiguous, is added to the product, before the gate if there is one; or None.
    """
    num_rows, num_columns = len(x), len(weight) // (1 if activation is None else 2)
    output = x.new_empty(num_rows, num_columns)
    kernels.multiply_few_rows[num_columns // tile.columns,](
        output,
        x,
        weight,
        weight if bias is None else bias,
        output if residual is None else residual,
        num_columns,
        weight.shape[1],
        x.stride(0),
        ROWS=num_rows,
        COLUMNS=tile.columns,
        INPUTS=tile.inputs,
        ACTIVATION=-1 if activation is None else ACTIVATIONS[activation],
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        num_warps=tile.num_warps,
        **device.overlapping,
    )
    return output
