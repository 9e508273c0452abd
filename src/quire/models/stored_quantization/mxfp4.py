"""The method mxfp4 of gpt-oss: the experts of a layer, stacked.

`<layer>_blocks` is uint8 [E, N, K / 32, 16] with the even input in the low half of a byte, and `<layer>_scales` uint8
[E, N, K / 32], exponents plus 127. Rows of `gate_up_proj` alternate between gate and up.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quire.models.families.hf_config import HFConfig
from quire.models.stored_quantization.scheme import LayerTensors, TensorSource, contradiction
from quire.models.stored_quantization.unpacking import MXFP4_FORM, mx_scales, unpack_rows
from quire.models.tensors.layer_weight import LayerWeight
from quire.models.tensors.stored_tensor import StoredTensor
from quire.ops.interface.quantized_weight import QuantizedRows, QuantizedWeight


class MXFP4:
    """The quantised layers of an mxfp4 checkpoint; layers without blocks are plain."""

    def __init__(self, config: HFConfig, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored
        self._excluded = config.texts("modules_to_not_convert")

    def suffixes(self, layer: str) -> tuple[str, ...] | None:
        """Return the suffixes of the layer's tensors; see `StoredQuantization`."""
        if f"{layer}_blocks" not in self._stored:
            return None
        if any(part in layer for part in self._excluded):
            contradiction(layer, "modules_to_not_convert")
        return ("_blocks", "_scales")

    def weight(self, layer: str, tensor: TensorSource) -> LayerWeight:
        """Return the weights of a layer's experts; see `StoredQuantization`."""
        tensors = LayerTensors(layer, self._stored, tensor)
        num_experts, num_outputs, num_groups, _ = tensors.header("_blocks", ("U8",), 4).shape
        num_rows = num_experts * num_outputs
        blocks = tensors.take("_blocks", ("U8",), num_experts, num_outputs, num_groups, 16)
        exponents = tensors.take("_scales", ("U8", "F8_E8M0"), num_experts, num_outputs, num_groups)
        octets, row_exponents = blocks.view(num_rows, num_groups * 16), exponents.view(num_rows, num_groups)

        def read(rows: slice | Tensor) -> QuantizedRows:
            return QuantizedRows(unpack_rows(octets[rows].contiguous(), 4), mx_scales(layer, row_exponents[rows]))

        return LayerWeight(QuantizedWeight(MXFP4_FORM, (num_rows, num_groups * 32), read, tensors.num_bytes))
