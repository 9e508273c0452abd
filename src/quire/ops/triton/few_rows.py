"""Products of one and two rows with plain weights of 16 bits, by a kernel whose only limit is memory."""

from __future__ import annotations

from typing import Final, NamedTuple

from torch import Tensor

from quire.ops.interface import Activation
from quire.ops.triton.kernels import few_rows as kernels
from quire.ops.triton.launches import ACTIVATIONS, Device, is_aligned

# The most rows that are multiplied so; from three on, tensor cores are as fast or faster.
MOST_ROWS: Final = 2
# Columns up to which so few programs have work that each reads more at a time.
FEW_COLUMNS: Final = 2048
# Columns from which on a program has more of them, and inputs from which on one with gates reads more at a time.
MANY_COLUMNS: Final = 4096
MANY_INPUTS: Final = 4096


class FewRowsTile(NamedTuple):
    """The sizes of a program, as they were fastest on an H200.

    Args:
        columns: number of columns of the output.
        inputs: number of inputs that are read at a time.
        num_warps: number of warps.
    """

    columns: int
    inputs: int
    num_warps: int

    @staticmethod
    def of(num_rows: int, num_columns: int, width: int, is_gated: bool) -> FewRowsTile | None:
        """Return the tile for a product of `num_rows` rows [R, width]; None where the kernel does not take it.

        Args:
            num_rows: R.
            num_columns: number of columns of the output.
            width: number of inputs.
            is_gated: columns have gates, whose weights are read too.
        """
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
    """Return whether the kernel can read a weight, whatever its shape is."""
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
    """Return the product of rows [R, in] with a weight [out, in]: [R, out], gated [R, out / 2].

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
