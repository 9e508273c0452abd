"""The method AWQ, in the version "gemm".

A layer has `qweight` int32 [K, N / 8], `qzeros` int32 [K / group, N / 8] and `scales` [K / group, N]; a weight is
(q - z) * s. A word holds eight consecutive outputs, interleaved: the bits 4 i to 4 i + 3 are of the output
8 n + [0, 2, 4, 6, 1, 3, 5, 7][i].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.models.families.hf_config import HFConfig
from quire.models.stored_quantization.scheme import (
    SCALE_DTYPES,
    LayerTensors,
    TensorSource,
    contradiction,
    is_plain,
    refuse,
)
from quire.models.stored_quantization.unpacking import check_scales, repeat_groups, unpack_columns
from quire.models.tensors.layer_weight import LayerWeight
from quire.models.tensors.stored_tensor import StoredTensor
from quire.ops.interface.quantized_weight import QuantizedRows, QuantizedWeight, WeightForm

# Position in its word of each of eight outputs: the inverse of the interleaving.
PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)


class AWQ:
    """The quantised layers of an AWQ checkpoint."""

    def __init__(self, config: HFConfig, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored
        self._bits = config.integer("bits" if config.has("bits") else "w_bit", 4)
        self._group_size = config.integer("group_size" if config.has("group_size") else "q_group_size", 128, least=-1)
        if self._group_size == 0:
            raise CheckpointError("config.json: quantization_config.group_size must not be 0", field="group_size")
        self._version = config.text("version", config.text("checkpoint_format", "gemm")).lower()
        self._has_zero_points = config.flag("zero_point", True)
        self._excluded = config.texts("modules_to_not_convert")

    def suffixes(self, layer: str) -> tuple[str, ...] | None:
        """Return the suffixes of the layer's tensors; see `StoredQuantization`."""
        if is_plain(layer, self._stored):
            return None
        if any(part in layer for part in self._excluded):
            contradiction(layer, "modules_to_not_convert")
        scheme = f"awq, version {self._version}, of {self._bits} bits"
        if self._bits != 4 or self._version != "gemm":
            refuse(layer, scheme, "the layout is not implemented")
        if not self._has_zero_points:
            refuse(layer, scheme, "weights without zero points are not implemented")
        return (".qweight", ".qzeros", ".scales")

    def weight(self, layer: str, tensor: TensorSource) -> LayerWeight:
        """Return the layer's weight; see `StoredQuantization`."""
        tensors = LayerTensors(layer, self._stored, tensor)
        num_inputs, num_words = tensors.header(".qweight", ("I32",), 2).shape
        num_outputs = num_words * 8
        group_size = self._group_size if self._group_size > 0 else max(1, num_inputs)
        num_groups = -(-num_inputs // group_size)
        form = WeightForm(
            bits=4,
            group=tensors.group(group_size, num_inputs, "awq"),
            scale=SCALE_DTYPES[tensors.header(".scales", tuple(SCALE_DTYPES), 2).dtype],
            has_zero_points=True,
        )
        words = tensors.take(".qweight", ("I32",), num_inputs, num_words)
        zero_words = tensors.take(".qzeros", ("I32",), num_groups, num_words)
        scales = tensors.take(".scales", tuple(SCALE_DTYPES), num_groups, num_outputs)
        places = torch.tensor(PLACES)

        def read(rows: slice | Tensor) -> QuantizedRows:
            outputs = torch.arange(num_outputs)[rows]
            zero_points = unpack_columns(zero_words, 4, outputs, places)
            row_scales = check_scales(layer, scales.index_select(1, outputs).t().contiguous())
            return QuantizedRows(
                unpack_columns(words, 4, outputs, places),
                repeat_groups(row_scales, group_size, num_inputs, form),
                zero_points=repeat_groups(zero_points, group_size, num_inputs, form),
            )

        return LayerWeight(QuantizedWeight(form, (num_outputs, num_inputs), read, tensors.num_bytes))
