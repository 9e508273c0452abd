"""Weights of 8-bit floating-point codes (e4m3) with scales of blocks, and the method fp8 of vendors' checkpoints.

A layer of the method has `weight` e4m3 [N, K] and `weight_scale_inv` [N / 128, K / 128], rounded up, if
`weight_block_size` is [128, 128]; without a block size, `weight_scale` or `weight_scale_inv` has one value, or one for
each output. Stacked experts have `<layer>` [E, N, K] and `<layer>_scale_inv`. A weight is code * scale.

Scales of activations (`input_scale`, `activation_scale`) are not read: activations are not rounded to 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Final, Literal

import torch
from torch import Tensor

from quire.errors import CheckpointError, shown
from quire.models.families.hf_config import HFConfig
from quire.models.stored_quantization.scheme import (
    LayerTensors,
    TensorSource,
    contradiction,
    is_plain,
    refuse,
)
from quire.models.stored_quantization.unpacking import check_scales, e8m0_values, repeat_groups
from quire.models.tensors.layer_weight import LayerWeight
from quire.models.tensors.stored_tensor import StoredTensor
from quire.ops.interface.quantized_weight import QuantizedRows, QuantizedWeight, WeightForm

FLOAT8: Final = ("F8_E4M3",)
SCALES: Final = ("F32", "BF16", "F16", "F8_E8M0", "U8")
MAX_BLOCK: Final = 1 << 20


class FP8:
    """The quantised layers of an fp8 checkpoint."""

    def __init__(self, config: HFConfig, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored
        self._block = read_block(config, "weight_block_size") if config.has("weight_block_size") else None
        self._format = config.text("fmt", "e4m3")
        self._excluded = (*config.texts("modules_to_not_convert"), *config.texts("ignored_layers"))

    def suffixes(self, layer: str) -> tuple[str, ...] | None:
        """Return the suffixes of the layer's tensors; see `StoredQuantization`."""
        if is_plain(layer, self._stored):
            return None
        # Exceptions match whole parts of a name: "mlp.gate" does not match "mlp.gate_proj".
        if any(f".{name}." in f".{layer}." for name in self._excluded):
            contradiction(layer, "modules_to_not_convert")
        if self._format != "e4m3":
            refuse(layer, f"fp8 of format {self._format}", "the format is not implemented")
        is_stack = layer in self._stored
        codes, scales = (
            ("", ("_scale_inv", "_scale")) if is_stack else (".weight", (".weight_scale_inv", ".weight_scale"))
        )
        present = [suffix for suffix in scales if layer + suffix in self._stored]
        return (codes, present[0] if present else scales[0])

    def weight(self, layer: str, tensor: TensorSource) -> LayerWeight:
        """Return the layer's weight; see `StoredQuantization`."""
        suffixes = self.suffixes(layer)
        assert suffixes is not None
        tensors = LayerTensors(layer, self._stored, tensor)
        *_, num_outputs, num_inputs = tensors.header(suffixes[0], FLOAT8, 2 if suffixes[0] else 3).shape
        block = self._block
        if block is None:
            has_one = prod(tensors.header(suffixes[1], SCALES).shape) <= self._num_stacked(layer)
            block = (num_outputs if has_one else 1, num_inputs)
        return read_float8(tensors, suffixes[0], suffixes[1], block, "fp8")

    def _num_stacked(self, layer: str) -> int:
        return self._stored[layer].shape[0] if layer in self._stored else 1


def read_block(config: HFConfig, name: str) -> tuple[int, int]:
    """Read the numbers of outputs and inputs of a block; the default is 128."""
    block = config.numbers(name, (128.0, 128.0))
    if not all(size.is_integer() and size <= MAX_BLOCK for size in block):
        raise CheckpointError(
            f"config.json: {name} must be two integers from 1 to {MAX_BLOCK}, got {shown(list(block))}", field=name
        )
    return int(block[0]), int(block[1])


def read_float8(tensors: LayerTensors, codes: str, scales: str, block: tuple[int, int], scheme: str) -> LayerWeight:
    """Return a weight of e4m3 codes."""
    shape = tensors.header(codes, FLOAT8, 2 if codes else 3).shape
    num_outputs, num_inputs = shape[-2:]
    block = max(1, min(block[0], num_outputs)), max(1, min(block[1], num_inputs))
    grid = (*shape[:-2], -(-num_outputs // block[0]), -(-num_inputs // block[1]))
    stored = tensors.header(scales, SCALES)
    if [size for size in stored.shape if size != 1] != [size for size in grid if size != 1]:
        tensors.fail(scales, f"is of shape {list(stored.shape)}; {list(grid)} is needed")
    form = WeightForm(8, _group(tensors, block[1], num_inputs, scheme), "float32", levels="e4m3")
    octets = tensors.take(codes, FLOAT8, *shape).view(torch.uint8).view(-1, num_inputs)
    factors = _float_scales(tensors.take(scales, SCALES, *stored.shape)).view(-1, grid[-1])

    def read(rows: slice | Tensor) -> QuantizedRows:
        row_codes = octets[rows]
        if bool(((row_codes & 127) == 127).any()):
            raise CheckpointError(f"layer {shown(tensors.layer)} has codes that are no numbers")
        index = torch.arange(len(octets))[rows]
        blocks = index // num_outputs * grid[-2] + index % num_outputs // block[0]
        row_scales = check_scales(tensors.layer, factors.index_select(0, blocks))
        return QuantizedRows(row_codes.contiguous(), repeat_groups(row_scales, block[1], num_inputs, form))

    return LayerWeight(QuantizedWeight(form, (len(octets), num_inputs), read, tensors.num_bytes))


def _group(tensors: LayerTensors, block_inputs: int, num_inputs: int, scheme: str) -> Literal[16, 32, 128]:
    """Return the group of the form: the largest that divides the block and the number of inputs."""
    if num_inputs and block_inputs % 128 == 0 and num_inputs % 128 == 0:
        return 128
    return tensors.group(block_inputs, num_inputs, scheme)


def _float_scales(scales: Tensor) -> Tensor:
    """Return scales in float32, which represents all of them exactly."""
    return e8m0_values()[scales.int()] if scales.dtype == torch.uint8 else scales.float()
