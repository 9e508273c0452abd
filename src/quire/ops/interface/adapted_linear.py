"""A linear layer with the adapters of a step's rows."""

from __future__ import annotations

from array import array

from torch import Tensor

from quire.ops.interface.lora import LoraLayer, LoraRows
from quire.ops.interface.ops import Linear


class StepAdapters:
    """The rows of the present step that have an adapter, for all layers of a decoder.

    A layer gets either all rows of a step or only the output rows, which are fewer.

    Attributes:
        all: rows among all rows; None if no row of the step has an adapter.
        output: rows among the output rows; None if none of them has an adapter, or all rows are output rows.
        call: addresses of `all` and `output` for native kernels, 0 for None, and the number of all rows
            (`StepAdapters` in lora.h); its own address stays.
        can_be_static: True if decodes with adapters may be captured: linear layers take adapters, and no experts.
    """

    __slots__ = ("all", "call", "can_be_static", "output")

    def __init__(self) -> None:
        self.all: LoraRows | None = None
        self.output: LoraRows | None = None
        self.call = array("q", (0, 0, 0))
        self.can_be_static = False

    def begin(self, adapters: tuple[LoraRows, LoraRows | None] | None) -> None:
        """Begin a step.

        Args:
            adapters: `all` and `output` of the step; None if no row has an adapter.
        """
        self.all, self.output = adapters or (None, None)
        for idx, rows in enumerate((self.all, self.output)):
            self.call[idx] = 0 if rows is None else rows.call.buffer_info()[0]
        self.call[2] = 0 if self.all is None else self.all.num_rows

    def rows(self, num_rows: int) -> LoraRows | None:
        """Return the adapter rows for a layer that gets `num_rows` rows."""
        return self.all if self.all is None or num_rows == self.all.num_rows else self.output


class AdaptedLinear:
    """A linear layer whose rows may have adapters; in steps without any it costs no more than the layer.

    Args:
        linear: the layer.
        layer: adapters of the layer.
        step: adapters of the present step's rows.

    Attributes:
        linear, layer, step: the arguments.
    """

    __slots__ = ("layer", "linear", "step")

    def __init__(self, linear: Linear, layer: LoraLayer, step: StepAdapters) -> None:
        self.linear, self.layer, self.step = linear, layer, step

    @property
    def is_active(self) -> bool:
        """True if an adapter of the present step adds to the layer."""
        return self.step.all is not None and self.layer.has(self.step.all.slots)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiply, and add the output of the rows' adapters: [T, in] to [T, out]."""
        rows = self.step.rows(len(x))
        if rows is not None and self.layer.has(rows.slots):
            residual = self.layer(x, rows, residual)
        return self.linear(x, residual)
