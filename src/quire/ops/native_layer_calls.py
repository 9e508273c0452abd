"""Structures of a layer's norms and weights, as the native call for all layers reads them."""

from __future__ import annotations

from quire.ops.adapted_linear import AdaptedLinear
from quire.ops.fused_layers import DenseLayer, RowNorm
from quire.ops.interface import HeadNorms, Linear
from quire.ops.native_library import TYPES, DenseLayerCall, LinearCall, NormScales
from quire.ops.native_linear import NativeLinear
from quire.ops.native_lora import NativeLoraLayer


def layer_call(layer: DenseLayer) -> DenseLayerCall:
    """Return the structure of a layer; it points into the tensors of its parts."""
    attention, mlp = layer.attention, layer.mlp
    return DenseLayerCall(
        mixer_norm=norm_scales(layer.mixer_norm),
        qkv=_linear_call(attention.qkv),
        head_norms=norm_scales(attention.head_norms),
        rotation_idx=layer.rotation_idx,
        group_idx=layer.group_idx,
        layer_idx=attention.layer_idx,
        num_heads=attention.num_heads,
        score_scale=attention.score_scale,
        sinks=None if attention.sinks is None else attention.sinks.data_ptr(),
        output=_linear_call(attention.output),
        ffn_norm=norm_scales(layer.ffn_norm),
        gate_up=_linear_call(mlp.gate_up),
        down=_linear_call(mlp.down),
    )


def is_native(linear: Linear) -> bool:
    """Return whether a layer is a native kernel, with adapters or without."""
    return isinstance(linear.linear if isinstance(linear, AdaptedLinear) else linear, NativeLinear)


def _linear_call(linear: Linear) -> LinearCall:
    if isinstance(linear, AdaptedLinear):
        assert isinstance(linear.layer, NativeLoraLayer)
        return linear.layer.as_call(_linear_call(linear.linear), linear.step)
    assert isinstance(linear, NativeLinear)
    return linear.as_call()


def norm_scales(norm: RowNorm | HeadNorms | None) -> NormScales:
    """Return the structure of a norm; it points into the norm's scales."""
    if norm is None:
        return NormScales()
    return NormScales(TYPES[norm.scales.dtype], norm.scales.data_ptr(), len(norm.scales), norm.eps)
