"""The method GPTQ.

A layer has `qweight` int32 [K * bits / 32, N], `qzeros` int32 [K / group, N * bits / 32], `scales` [K / group, N] and
usually `g_idx` int32 [K], the group of each input; a weight is (q - z) * s. With `desc_act` the inputs of a group are
not adjacent: they are sorted by group, and the weight comes with the order of its inputs.

Symmetric weights have the zero point 2 ** (bits - 1); their `qzeros` are ignored, since published checkpoints disagree.
The format "gptq" stores zero points minus one, "gptq_v2" stores them unchanged. Writers subtract from whole words, so
that a zero point of 0 borrows from the next one; addition to whole words undoes that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from quire.models.families.hf_config import HFConfig
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
    check_scales,
    order_inputs,
    repeat_groups,
    sort_inputs,
    unpack_columns,
    unpack_rows,
)
from quire.models.tensors.layer_weight import LayerWeight
from quire.models.tensors.stored_tensor import StoredTensor
from quire.ops.interface.quantized_weight import QuantizedRows, QuantizedWeight, WeightForm

# 1 in each code of a word.
ONES: Final = {4: 0x11111111, 8: 0x01010101}
NEGATIVE, POSITIVE = "-:", "+:"


class LayerScheme(NamedTuple):
    """The scheme of a layer, as the fields of `quantization_config`."""

    bits: int
    group_size: int
    sym: bool
    desc_act: bool


class GPTQ:
    """The quantised layers of a GPTQ checkpoint."""

    def __init__(self, config: HFConfig, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored
        self._format = config.text("checkpoint_format", config.text("format", "gptq"))
        # Layers are asymmetric by default, so that the stored zero points are used.
        self._default = _read_scheme(config, LayerScheme(bits=4, group_size=128, sym=False, desc_act=False))
        # The first rule whose expression matches a layer applies; None for layers that are not quantised.
        self._rules = [
            (
                rule.removeprefix(POSITIVE).removeprefix(NEGATIVE),
                None if rule.startswith(NEGATIVE) else _read_scheme(changes, self._default),
            )
            for rule, changes in (config.parts("dynamic") or {}).items()
        ]
        self._matches = match_layers([pattern for pattern, _ in self._rules], stored)

    def suffixes(self, layer: str) -> tuple[str, ...] | None:
        """Return the suffixes of the layer's tensors; see `StoredQuantization`."""
        if is_plain(layer, self._stored):
            return None
        scheme = self._scheme(layer)
        has_order = scheme.desc_act or f"{layer}.g_idx" in self._stored
        return (".qweight", ".qzeros", ".scales", *((".g_idx",) if has_order else ()))

    def weight(self, layer: str, tensor: TensorSource) -> LayerWeight:
        """Return the layer's weight; see `StoredQuantization`."""
        scheme = self._scheme(layer)
        tensors = LayerTensors(layer, self._stored, tensor)
        num_words, num_outputs = tensors.header(".qweight", ("I32",), 2).shape
        num_inputs = num_words * 32 // scheme.bits
        group_size = scheme.group_size if scheme.group_size > 0 else max(1, num_inputs)
        num_groups = -(-num_inputs // group_size)
        form = WeightForm(
            bits=4 if scheme.bits == 4 else 8,
            group=tensors.group(group_size, num_inputs, f"gptq of {scheme.bits} bits"),
            scale=SCALE_DTYPES[tensors.header(".scales", tuple(SCALE_DTYPES), 2).dtype],
            has_zero_points=not scheme.sym,
            offset=1 << (scheme.bits - 1) if scheme.sym else 0,
        )
        words = tensors.take(".qweight", ("I32",), num_words, num_outputs)
        scales = tensors.take(".scales", tuple(SCALE_DTYPES), num_groups, num_outputs)
        zero_words = tensors.take(".qzeros", ("I32",), num_groups, -(-num_outputs * scheme.bits // 32))
        if self._format == "gptq":
            zero_words = zero_words + ONES[scheme.bits]
        order = None
        if scheme.desc_act or tensors.has(".g_idx"):
            order = sort_inputs(layer, tensors.take(".g_idx", ("I32", "I64"), num_inputs), group_size)

        def read(rows: slice | Tensor) -> QuantizedRows:
            outputs = torch.arange(num_outputs)[rows]
            codes = unpack_rows(words[:, rows].t().contiguous(), scheme.bits)
            zero_points = None
            if not scheme.sym:
                zero_points = unpack_columns(zero_words, scheme.bits, outputs)
                zero_points = repeat_groups(zero_points, group_size, num_inputs, form)
            row_scales = check_scales(layer, scales[:, rows].t().contiguous())
            return QuantizedRows(
                order_inputs(codes, order),
                repeat_groups(row_scales, group_size, num_inputs, form),
                zero_points=zero_points,
            )

        return LayerWeight(QuantizedWeight(form, (num_outputs, num_inputs), read, tensors.num_bytes), order)

    def _scheme(self, layer: str) -> LayerScheme:
        scheme: LayerScheme | None = self._default
        for pattern, changed in self._rules:
            if layer in self._matches[pattern]:
                scheme = changed
                break
        if scheme is None:
            contradiction(layer, "dynamic")
        name = f"gptq of {scheme.bits} bits, checkpoint_format {self._format}"
        if scheme.bits not in ONES:
            refuse(layer, name, "codes of this number of bits are not implemented")
        if self._format not in ("gptq", "gptq_v2"):
            refuse(layer, name, "the layout is not implemented")
        if scheme.group_size == 0:
            refuse(layer, name, "groups have no size")
        return scheme


def _read_scheme(config: HFConfig, default: LayerScheme) -> LayerScheme:
    return LayerScheme(
        bits=config.integer("bits", default.bits),
        group_size=config.integer("group_size", default.group_size, least=-1),
        sym=config.flag("sym", default.sym),
        desc_act=config.flag("desc_act", default.desc_act),
    )
