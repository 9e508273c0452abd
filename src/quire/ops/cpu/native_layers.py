"""All layers of a model as one native call, and the final norm with the output head as another, for steps of few rows.

With a call per kernel, much of the time of such a step is overhead: an output tensor, pointers, a call. Here structures
with the weights of all layers are filled once, and a step only passes its rows, caches and buffers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from quire.ops.cpu.native_attention import NativeStepAttention, reads_cache
from quire.ops.cpu.native_layer_calls import layer_call, norm_scales
from quire.ops.cpu.native_library import MAX_ROWS, TYPES, NativeLibrary
from quire.ops.cpu.native_linear import NativeLinear
from quire.ops.cpu.native_states import NativeStepStates
from quire.ops.cpu.native_structures import LayerCall
from quire.ops.interface.fused_layers import PackedAttention, PackedLayer, RowNorm
from quire.ops.interface.ops import Ops, Rotation, StateBatch
from quire.ops.interface.shared_ranks import SharedMemoryRanks

# Buffers begin at multiples of this number of columns: a cache line of bfloat16.
ALIGNMENT: Final = 32


class NativeLayers:
    """The layers of a model, all of whose parts are native kernels."""

    def __init__(
        self,
        library: NativeLibrary,
        layers: Sequence[PackedLayer],
        ops: Ops,
        deterministic: bool = False,
        ranks: SharedMemoryRanks | None = None,
    ) -> None:
        self._ranks = ranks
        self._library, self._ops, self._is_deterministic = library, ops, deterministic
        self._layers = layers  # the structures point into their tensors
        self._calls = (LayerCall * len(layers))(*map(layer_call, layers))
        self._num_heads = {
            layer.group_idx: layer.mixer.num_heads for layer in layers if isinstance(layer.mixer, PackedAttention)
        }
        width, inner = layers[0].mixer_norm.scales.shape[0], max(layer.output.width for layer in self._calls)
        # Columns of the buffers: normed or mixed rows, results of matmuls, queries, gates, rows between the halves.
        products = max(max(layer.input.num_columns, layer.down.width) for layer in self._calls)
        columns = max(width, inner), products, inner, inner, width
        *self._starts, self._num_columns = accumulate((-(-n // ALIGNMENT) * ALIGNMENT for n in columns), initial=0)

    def __call__(
        self, x: Tensor, rotations: Sequence[Rotation], groups: Sequence[Any], storages: Sequence[Any]
    ) -> Tensor | None:
        """Run the layers; see `FusedLayers`."""
        num_rows = len(x)
        if not 0 < num_rows <= MAX_ROWS:
            return None
        if self._ranks is not None and x.nbytes > self._ranks.call.slot_bytes:
            return None
        # The steps must live until the call has returned: the pointers point into them.
        steps: list[NativeStepStates | NativeStepAttention] = []
        step_pointers = array("Q")
        for idx, (batch, storage) in enumerate(zip(groups, storages, strict=True)):
            if isinstance(batch, StateBatch):
                steps.append(NativeStepStates(self._library, batch, storage, self._ops))
            elif reads_cache(storage):
                steps.append(NativeStepAttention(self._library, batch, storage, self._is_deterministic))
            else:
                return None
            step_pointers.extend(steps[-1].pointers(self._num_heads.get(idx, 0)))
        rotation_pointers = array("Q", [tensor.data_ptr() for rotation in rotations for tensor in rotation])
        hidden, scratch = torch.empty_like(x), x.new_empty(num_rows, self._num_columns)
        first, row_bytes = scratch.data_ptr(), num_rows * x.itemsize
        buffers = array("Q", [*(first + row_bytes * start for start in self._starts), hidden.data_ptr()])
        status = self._library.layers(
            TYPES[x.dtype],
            self._calls,
            len(self._calls),
            num_rows,
            step_pointers.buffer_info()[0],
            rotation_pointers.buffer_info()[0],
            x.data_ptr(),
            buffers.buffer_info()[0],
            None if self._ranks is None else self._ranks.call,
        )
        if self._ranks is not None:
            self._ranks.check(status)
        return hidden


class NativeNormedLinear:
    """A norm and a linear layer in one call: the final norm and the output head of a model."""

    def __init__(self, library: NativeLibrary, norm: RowNorm, linear: NativeLinear) -> None:
        self._run, self._num_outputs = library.normed_linear, linear.num_outputs
        self._parts = norm, linear  # the structures point into their tensors
        self._norm, self._linear = norm_scales(norm), linear.as_call()

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise and multiply rows [R, E], which may be strided."""
        num_rows, width = x.shape
        normed, output = x.new_empty(num_rows, width), x.new_empty(num_rows, self._num_outputs)
        pointers = normed.data_ptr(), output.data_ptr()
        self._run(TYPES[x.dtype], self._norm, self._linear, num_rows, x.data_ptr(), x.stride(0), *pointers)
        return output
