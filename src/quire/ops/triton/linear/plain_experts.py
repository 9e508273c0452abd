"""One linear layer of all experts of an MoE block as a grouped GEMM, with plain weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from quire.ops.interface.ops import Linear
from quire.ops.triton.kernels import experts as kernels
from quire.ops.triton.launches import is_aligned
from quire.ops.triton.linear.expert_rows import RowGroups
from quire.ops.triton.linear.plain_linear import TritonLinear

COLUMNS: Final = 64
INPUTS: Final = 64


class PlainExpertLayer:
    """A layer of all experts."""

    def __init__(self, layers: Sequence[TritonLinear]) -> None:
        self.activation = layers[0].activation
        self._layers, self._num_columns = layers, layers[0].weight.shape[0]
        device = layers[0].weight.device
        self._weights = torch.tensor([layer.weight.data_ptr() for layer in layers], device=device)
        biases = [0 if layer.bias is None else layer.bias.data_ptr() for layer in layers]
        self._biases = torch.tensor(biases, device=device)

    def multiply(self, x: Tensor, groups: RowGroups, *, is_first: bool, scales_input: bool) -> Tensor:
        """Multiply grouped rows by their experts; see `GroupedLinear`."""
        num_columns, width = self._num_columns, x.shape[1]
        dtype = x.dtype if is_first else torch.float32
        output = torch.empty(len(groups.row_ids), num_columns, dtype=dtype, device=x.device)
        kernels.multiply_by_expert[groups.tiles.shape[1], -(-num_columns // COLUMNS)](
            output,
            x,
            groups.row_ids,
            groups.scores,
            self._weights,
            self._biases,
            *groups.tiles.unbind(),
            num_columns,
            width,
            x.stride(0),
            NUM_EXPERTS=len(self._layers),
            GATHER=is_first,
            SCALE_INPUT=is_first and scales_input,
            SCALE_OUTPUT=not is_first and not scales_input,
            BIAS=self._layers[0].bias is not None,
            ROWS=groups.tile_rows,
            COLUMNS=COLUMNS,
            INPUTS=INPUTS,
        )
        return output


def plain_layer(layers: Sequence[Linear]) -> PlainExpertLayer | None:
    """Return layers of experts as a grouped layer; None if weights are not plain, not alike, or not aligned."""
    plain = [layer for layer in layers if isinstance(layer, TritonLinear) and is_aligned(layer.weight)]
    if len(plain) < len(layers) or len({(layer.weight.shape, layer.weight.dtype) for layer in plain}) > 1:
        return None
    return PlainExpertLayer(plain)
