"""The quantised weight of a layer, as a checkpoint stores it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from quire.ops.interface.quantized_weight import QuantizedWeight


class LayerWeight(NamedTuple):
    """The quantised weight of a layer, or of all experts of a layer.

    Args:
        weight: weight [N, K]; for stacked experts [E * N, K], with the rows of expert e from e * N on.
        input_order: int64 [K], index of the layer's input for column k; None for k. The layer is
            `inputs[:, input_order] @ weight.T`.
    """

    weight: QuantizedWeight
    input_order: Tensor | None = None
