"""The method compressed-tensors, which llm-compressor writes: groups of layers, each with its own scheme.

| format | stored tensors of a layer with N outputs and K inputs |
|---|---|
| pack-quantized | `weight_packed` int32 [N, K * bits / 32], `weight_shape`, `weight_scale` [N, groups], \
asymmetric ones `weight_zero_point` int32 [N * bits / 32, groups]; old ones `weight_g_idx` [K] |
| int-quantized | `weight` int8 [N, K], `weight_scale`, asymmetric ones `weight_zero_point` int8 [N, groups] |
| float-quantized | `weight` e4m3 [N, K], `weight_scale` [1], [N, 1], [N, groups] or of blocks of outputs and inputs |
| mxfp4-pack-quantized | `weight_packed` uint8 [N, K / 2], `weight_scale` uint8 [N, K / 32]: exponents |

Codes and zero points are packed as q + 2 ** (bits - 1). Schemes of activations and their stored scales (`input_scale`)
are ignored: kernels do not round activations for codes of e4m3, and round each row by its own largest magnitude for
other codes, so that no value is clipped. `kv_cache_scheme` is ignored: an int8 cache has a scale for each vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from quire.models.families.hf_config import HFConfig
from quire.models.stored_quantization.float8 import FLOAT8, read_block, read_float8
from quire.models.stored_quantization.names import match_layers
from quire.models.stored_quantization.scheme import (
    SCALE_DTYPES,
    LayerTensors,
    TensorSource,
    contradiction,
    is_plain,
    refuse,
)
from quire.models.stored_quantization.unpacking import (
    MXFP4_FORM,
    check_scales,
    mx_scales,
    order_inputs,
    repeat_groups,
    sort_inputs,
    unpack_columns,
    unpack_rows,
)
from quire.models.tensors.layer_weight import LayerWeight
from quire.models.tensors.stored_tensor import StoredTensor
from quire.ops.interface.quantized_weight import QuantizedRows, QuantizedWeight, WeightForm

PACKED, INTEGERS, MXFP4 = "pack-quantized", ("int-quantized", "naive-quantized"), "mxfp4-pack-quantized"
FLOATS = ("float-quantized", "naive-quantized")
REGEX = "re:"
# The class that targets name; all layers that are read have this class.
LINEAR = "Linear"
REASONS: Mapping[str, str] = {
    "nvfp4-pack-quantized": "scales of 8-bit floating point are not implemented",
}


class GroupScheme(NamedTuple):
    """The scheme of a group of layers.

    Args:
        name: format and width, for errors.
        format: layout of the stored tensors.
        bits: number of bits of a code.
        group_size: number of inputs that share a scale; None for one scale for each output.
        symmetric: False if groups have zero points.
        block: outputs and inputs of a block of floating-point codes, 0 for all of them; None for integers.
        problem: reason why the scheme is not supported; "" if it is.
    """

    name: str
    format: str
    bits: int
    group_size: int | None
    symmetric: bool
    block: tuple[int, int] | None
    problem: str


class CompressedTensors:
    """The quantised layers of a compressed-tensors checkpoint."""

    def __init__(self, config: HFConfig, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored
        general = _problem_of_model(config)
        self._schemes: dict[str, GroupScheme] = {}
        for group in (config.parts("config_groups") or {}).values():
            scheme = _read_scheme(group, group.text("format", config.text("format", "")), general)
            for target in group.texts("targets"):
                # The first of two groups with the same target applies.
                self._schemes.setdefault(target, scheme)
        ignore = config.texts("ignore")
        self._patterns = sorted(target for target in self._schemes if target.startswith(REGEX))
        patterns = [name for name in (*self._patterns, *ignore) if name.startswith(REGEX)]
        matches = match_layers([name.removeprefix(REGEX) for name in patterns], stored)
        self._matches = {name: matches[name.removeprefix(REGEX)] for name in patterns}
        self._ignored = frozenset(ignore).union(*(self._matches.get(name, ()) for name in ignore))

    def suffixes(self, layer: str) -> tuple[str, ...] | None:
        """Return the suffixes of the layer's tensors; see `StoredQuantization`."""
        if is_plain(layer, self._stored):
            return None
        if layer in self._ignored:
            contradiction(layer, "ignore")
        scheme = self._scheme(layer)
        if scheme.block is not None or scheme.format in INTEGERS:
            return (".weight", ".weight_scale", *(() if scheme.symmetric else (".weight_zero_point",)))
        if scheme.format == MXFP4:
            return (".weight_packed", ".weight_scale")
        order = (".weight_g_idx",) if f"{layer}.weight_g_idx" in self._stored else ()
        zero_points = () if scheme.symmetric else (".weight_zero_point",)
        return (".weight_packed", ".weight_scale", ".weight_shape", *zero_points, *order)

    def weight(self, layer: str, tensor: TensorSource) -> LayerWeight:
        """Return the layer's weight; see `StoredQuantization`."""
        scheme = self._scheme(layer)
        tensors = LayerTensors(layer, self._stored, tensor)
        if scheme.block is not None:
            num_outputs, num_inputs = tensors.header(".weight", FLOAT8, 2).shape
            block = scheme.block[0] or num_outputs, scheme.block[1] or num_inputs
            return read_float8(tensors, ".weight", ".weight_scale", block, scheme.name)
        if scheme.format in INTEGERS:
            return _integers(tensors, scheme)
        return _mxfp4(tensors) if scheme.format == MXFP4 else _packed(tensors, scheme)

    def _scheme(self, layer: str) -> GroupScheme:
        # A name takes precedence over expressions, and these over the class.
        matching = (pattern for pattern in self._patterns if layer in self._matches[pattern])
        target = layer if layer in self._schemes else next(matching, LINEAR)
        if target not in self._schemes:
            refuse(layer, "compressed-tensors", "it is a target of no group in config_groups")
        scheme = self._schemes[target]
        if scheme.problem:
            refuse(layer, scheme.name, scheme.problem)
        return scheme


def _read_scheme(group: HFConfig, layout: str, general: str) -> GroupScheme:
    weights = group.part("weights") or HFConfig({})
    bits = weights.integer("num_bits", 8)
    size = weights.integer("group_size", -1, least=-1)
    strategy = weights.text("strategy", "group" if size > 0 else "channel")
    kind = weights.text("type", "int")
    block = _read_block(weights, strategy, size) if kind == "float" and layout in FLOATS else None
    scheme = GroupScheme(
        name=f"{layout} of {bits} bits",
        format=layout,
        bits=bits,
        group_size=size if strategy == "group" else None,
        symmetric=weights.flag("symmetric", True),
        block=block,
        problem=general,
    )
    problem = _problem(group, scheme, kind, strategy)
    return scheme._replace(problem=general or problem)


def _read_block(weights: HFConfig, strategy: str, group_size: int) -> tuple[int, int] | None:
    """Return the numbers of outputs and inputs that share a scale, 0 for all; None for an unknown strategy."""
    if strategy == "block":
        return read_block(weights, "block_structure")
    return {"tensor": (0, 0), "channel": (1, 0), "group": (1, group_size)}.get(strategy)


def _problem_of_model(config: HFConfig) -> str:
    """Return the reason why no layer is supported; "" if there is none."""
    sparsity = config.part("sparsity_config")
    if sparsity is not None and sparsity.text("format", "dense") != "dense":
        return "its zeros are left out (sparsity_config)"
    transforms = config.part("transform_config")
    if transforms is not None and transforms.parts("config_groups"):
        return "inputs or outputs of layers are transformed (transform_config)"
    return ""


def _problem(group: HFConfig, scheme: GroupScheme, kind: str, strategy: str) -> str:
    """Return the reason why a group of layers is not supported; "" if there is none."""
    if scheme.format not in (PACKED, *INTEGERS, *FLOATS, MXFP4):
        return REASONS.get(scheme.format, "the format is not implemented")
    kinds = ("float",) * (scheme.format in (*FLOATS, MXFP4)) + ("int",) * (scheme.format in (PACKED, *INTEGERS))
    if kind not in kinds:
        return f"codes of type {kind} in this format are not implemented"
    if scheme.block is None and strategy not in ("group", "channel"):
        return f"scales of strategy {strategy} are not implemented"
    if strategy == "group" and (scheme.group_size or 0) < 1:
        return "groups have no size"
    if scheme.bits not in ((4,) if scheme.format == MXFP4 else (8,) if kind == "float" else (4, 8)):
        return "codes of this number of bits are not implemented"
    if scheme.format == MXFP4 and (scheme.group_size != 32 or not scheme.symmetric):
        return "groups of 32 inputs without zero points are needed"
    if kind == "float" and not scheme.symmetric:
        return "codes of floating point with zero points are not implemented"
    return "outputs are quantised" if group.has("output_activations") else ""


def _packed(tensors: LayerTensors, scheme: GroupScheme) -> LayerWeight:
    num_outputs, num_words = tensors.header(".weight_packed", ("I32",), 2).shape
    num_inputs = num_words * 32 // scheme.bits
    shape = tensors.take(".weight_shape", ("I32", "I64"), 2).tolist()
    if shape != [num_outputs, num_inputs]:
        tensors.fail(".weight_shape", f"is {shape}; {[num_outputs, num_inputs]} is the shape of the packed weight")
    words = tensors.take(".weight_packed", ("I32",), num_outputs, num_words)
    scales, group_size = _scales(tensors, scheme, num_outputs, num_inputs)
    form = _form(tensors, scheme, group_size, num_inputs, offset=1 << (scheme.bits - 1))
    zero_words: Tensor | None = None
    if not scheme.symmetric:
        num_zero_words = -(-num_outputs * scheme.bits // 32)
        zero_words = tensors.take(".weight_zero_point", ("I32",), num_zero_words, scales.shape[1]).t().contiguous()
    order = None
    if tensors.has(".weight_g_idx"):
        groups = tensors.take(".weight_g_idx", ("I32",), num_inputs)
        order = None if bool((groups == -1).all()) else sort_inputs(tensors.layer, groups, group_size)

    def read(rows: slice | Tensor) -> QuantizedRows:
        codes = unpack_rows(words[rows].contiguous(), scheme.bits)
        zero_points = None
        if zero_words is not None:
            zero_points = unpack_columns(zero_words, scheme.bits, torch.arange(num_outputs)[rows])
            zero_points = repeat_groups(zero_points, group_size, num_inputs, form)
        return QuantizedRows(
            order_inputs(codes, order),
            repeat_groups(check_scales(tensors.layer, scales[rows]), group_size, num_inputs, form),
            zero_points=zero_points,
        )

    return LayerWeight(QuantizedWeight(form, (num_outputs, num_inputs), read, tensors.num_bytes), order)


def _integers(tensors: LayerTensors, scheme: GroupScheme) -> LayerWeight:
    num_outputs, num_inputs = tensors.header(".weight", ("I8",), 2).shape
    integers = tensors.take(".weight", ("I8",), num_outputs, num_inputs)
    scales, group_size = _scales(tensors, scheme, num_outputs, num_inputs)
    form = _form(tensors, scheme._replace(bits=8), group_size, num_inputs, offset=128)
    zeros = None if scheme.symmetric else tensors.take(".weight_zero_point", ("I8",), *scales.shape)

    def read(rows: slice | Tensor) -> QuantizedRows:
        return QuantizedRows(
            _unsigned(integers[rows]),
            repeat_groups(check_scales(tensors.layer, scales[rows]), group_size, num_inputs, form),
            zero_points=None if zeros is None else repeat_groups(_unsigned(zeros[rows]), group_size, num_inputs, form),
        )

    return LayerWeight(QuantizedWeight(form, (num_outputs, num_inputs), read, tensors.num_bytes))


def _mxfp4(tensors: LayerTensors) -> LayerWeight:
    num_outputs, num_octets = tensors.header(".weight_packed", ("U8",), 2).shape
    num_inputs = 2 * num_octets
    if num_inputs % 32:
        refuse(tensors.layer, MXFP4, f"it has {num_inputs} inputs, and a multiple of 32 is needed")
    octets = tensors.take(".weight_packed", ("U8",), num_outputs, num_octets)
    exponents = tensors.take(".weight_scale", ("U8", "F8_E8M0"), num_outputs, num_inputs // 32)

    def read(rows: slice | Tensor) -> QuantizedRows:
        codes = unpack_rows(octets[rows].contiguous(), 4)
        return QuantizedRows(codes, mx_scales(tensors.layer, exponents[rows]))

    return LayerWeight(QuantizedWeight(MXFP4_FORM, (num_outputs, num_inputs), read, tensors.num_bytes))


def _scales(tensors: LayerTensors, scheme: GroupScheme, num_outputs: int, num_inputs: int) -> tuple[Tensor, int]:
    """Return the scales [N, groups] and the number of inputs of a group."""
    group_size = min(scheme.group_size or num_inputs, num_inputs) or 1
    shape = (num_outputs, -(-num_inputs // group_size))
    return tensors.take(".weight_scale", tuple(SCALE_DTYPES), *shape), group_size


def _form(tensors: LayerTensors, scheme: GroupScheme, group_size: int, num_inputs: int, offset: int) -> WeightForm:
    return WeightForm(
        bits=4 if scheme.bits == 4 else 8,
        group=tensors.group(group_size, num_inputs, scheme.name),
        scale=SCALE_DTYPES[tensors.header(".weight_scale", tuple(SCALE_DTYPES), 2).dtype],
        has_zero_points=not scheme.symmetric,
        offset=offset if scheme.symmetric else 0,
    )


def _unsigned(integers: Tensor) -> Tensor:
    """Return int8 values plus 128 as uint8."""
    return integers.view(torch.uint8) ^ 128
