"""The layers of a dense model, and the end of any model, as one native call each, for steps of few rows.

Between the kernels of such a step, most of the time is their caller's: a tensor to write to, pointers, a call. Here the
weights of all layers lie in structures that are filled once, and a step gives its rows, caches and buffers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from quire.ops.fused_layers import DenseLayer, RowNorm
from quire.ops.interface import Rotation
from quire.ops.native_attention import NativeStepAttention, reads_cache
from quire.ops.native_layer_calls import is_native, layer_call, norm_scales
from quire.ops.native_library import TYPES, DenseLayerCall, NativeLibrary
from quire.ops.native_linear import NativeLinear

# Steps of more rows take so long that the time of their calls is not measurable.
MAX_ROWS: Final = 32
# Columns at whose multiples buffers begin: a cache line of bfloat16.
ALIGNMENT: Final = 32


class NativeDenseLayers:
    """The layers of a dense model whose parts are all native kernels.

    Args:
        library: library of the kernels.
        layers: layers whose projections are `NativeLinear`; those of a cache group have as many heads.
        deterministic: see `NativeOps`.
    """

    def __init__(self, library: NativeLibrary, layers: Sequence[DenseLayer], deterministic: bool = False) -> None:
        self._library, self._is_deterministic = library, deterministic
        self._layers = layers  # the structures point into their tensors
        self._calls = (DenseLayerCall * len(layers))(*map(layer_call, layers))
        self._num_heads = {layer.group_idx: layer.attention.num_heads for layer in layers}
        # Columns of the buffers: rows that are normed or attended, products, queries, and rows between the halves.
        columns = (
            max(max(layer.qkv.width, layer.output.width) for layer in self._calls),
            max(max(layer.qkv.num_columns, layer.down.width) for layer in self._calls),
            max(layer.output.width for layer in self._calls),
            self._calls[0].qkv.width,
        )
        *self._starts, self._num_columns = accumulate((-(-n // ALIGNMENT) * ALIGNMENT for n in columns), initial=0)

    def __call__(
        self, x: Tensor, rotations: Sequence[Rotation], groups: Sequence[Any], storages: Sequence[Any]
    ) -> Tensor | None:
        """Run the layers; see `FusedLayers`."""
        num_rows = len(x)
        if not 0 < num_rows <= MAX_ROWS or not all(map(reads_cache, storages)):
            return None
        # The steps live until the call has returned: the pointers are theirs.
        steps = [
            NativeStepAttention(self._library, batch, storage, self._is_deterministic)
            for batch, storage in zip(groups, storages, strict=True)
        ]
        step_pointers = array("Q")
        for idx, step in enumerate(steps):
            step_pointers.extend(step.pointers(self._num_heads[idx]))
        rotation_pointers = array("Q", [tensor.data_ptr() for rotation in rotations for tensor in rotation])
        hidden, scratch = torch.empty_like(x), x.new_empty(num_rows, self._num_columns)
        first, row_bytes = scratch.data_ptr(), num_rows * x.itemsize
        buffers = array("Q", [*(first + row_bytes * start for start in self._starts), hidden.data_ptr()])
        self._library.dense_layers(
            TYPES[x.dtype],
            self._calls,
            len(self._calls),
            num_rows,
            step_pointers.buffer_info()[0],
            rotation_pointers.buffer_info()[0],
            x.data_ptr(),
            buffers.buffer_info()[0],
        )
        return hidden


class NativeNormedLinear:
    """A norm and the product of its result: the end of a model.

    Args:
        library: library of the kernels.
        norm: norm of hidden states.
        linear: linear layer.
    """

    def __init__(self, library: NativeLibrary, norm: RowNorm, linear: NativeLinear) -> None:
        self._run, self._num_outputs = library.normed_linear, linear.num_outputs
        self._parts = norm, linear  # the structures point into their tensors
        self._norm, self._linear = norm_scales(norm), linear.as_call()

    def __call__(self, x: Tensor) -> Tensor:
        """Norm and multiply rows [R, E], which may lie apart."""
        num_rows, width = x.shape
        normed, output = x.new_empty(num_rows, width), x.new_empty(num_rows, self._num_outputs)
        pointers = normed.data_ptr(), output.data_ptr()
        self._run(TYPES[x.dtype], self._norm, self._linear, num_rows, x.data_ptr(), x.stride(0), *pointers)
        return output


def can_fuse(layers: Sequence[DenseLayer]) -> bool:
    """Return whether all products are native, and the layers of each cache group have as many heads."""
    heads = {(layer.group_idx, layer.attention.num_heads) for layer in layers}
    products = [part for layer in layers for part in (layer.attention.qkv, layer.attention.output, *layer.mlp)]
    return len(heads) == len(dict(heads)) and all(map(is_native, products))
