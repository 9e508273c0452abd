"""Structures that describe layers, for the native calls that run all layers, the output head or experts."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

from torch import Tensor

from quire.ops.cpu.native_library import TYPES
from quire.ops.cpu.native_linear import NativeLinear
from quire.ops.cpu.native_lora import NativeLoraLayer
from quire.ops.cpu.native_states import gated_delta_net_call, short_conv_call
from quire.ops.cpu.native_structures import AttentionCall, ExpertCall, ExpertsCall, LayerCall, LinearCall, NormScales
from quire.ops.interface.adapted_experts import ExpertAdapters
from quire.ops.interface.adapted_linear import AdaptedLinear
from quire.ops.interface.fused_layers import (
    PackedAttention,
    PackedLayer,
    PackedMLP,
    PackedRecurrence,
    RoutedExperts,
    RowNorm,
)
from quire.ops.interface.ops import HeadNorms, Linear
from quire.ops.interface.recurrent_weights import GatedDeltaNetWeights, ShortConvWeights


def layer_call(layer: PackedLayer) -> LayerCall:
    """Return the structure of a layer, which points into the tensors of the layer's parts."""
    mixer, ffn = layer.mixer, layer.ffn
    call = LayerCall(
        mixer_norm=norm_scales(layer.mixer_norm),
        output=linear_call(mixer.output),
        group_idx=layer.group_idx,
        layer_idx=layer.layer_idx,
        ffn_norm=norm_scales(layer.ffn_norm),
    )
    match mixer:
        case PackedAttention():
            call.input = linear_call(mixer.qkv)
            call.attention = ctypes.pointer(_attention_call(mixer, layer.rotation_idx))
        case PackedRecurrence(weights=ShortConvWeights() as weights):
            call.input, call.short_conv = linear_call(mixer.input), ctypes.pointer(short_conv_call(weights))
        case PackedRecurrence(weights=GatedDeltaNetWeights() as weights):
            call.input, call.delta_net = linear_call(mixer.input), ctypes.pointer(gated_delta_net_call(weights))
    match ffn:
        case PackedMLP():
            call.gate_up, call.down = map(linear_call, ffn)
        case RoutedExperts():
            call.experts = ctypes.pointer(experts_call(ffn))
    return call


def _attention_call(attention: PackedAttention, rotation_idx: int) -> AttentionCall:
    return AttentionCall(
        head_norms=norm_scales(attention.head_norms),
        rotation_idx=rotation_idx,
        num_heads=attention.num_heads,
        score_scale=attention.score_scale,
        soft_cap=attention.soft_cap or 0.0,
        sinks=_pointer(attention.sinks),
        gate=linear_call(attention.gate),
    )


def experts_call(experts: RoutedExperts) -> ExpertsCall:
    """Return the structure of experts, which points into their tensors."""
    pairs = zip(map(linear_call, experts.gate_ups), map(linear_call, experts.downs), strict=True)
    parts = [ExpertCall()] * experts.first_expert + [ExpertCall(*pair) for pair in pairs]
    parts += [ExpertCall()] * (experts.num_experts - len(parts))
    call = ExpertsCall(
        router=linear_call(experts.router),
        choice_bias=_pointer(experts.choice_bias),
        expert_scales=_pointer(experts.expert_scales),
        experts=(ExpertCall * len(parts))(*parts),
        num_experts=len(parts),
        num_chosen=experts.num_chosen,
        is_sigmoid=experts.is_sigmoid,
        is_renormalised=experts.renormalised,
        is_input_scaled=experts.scaled_input,
        sum_eps=experts.sum_eps,
        score_scale=experts.score_scale,
        logit_scale=experts.logit_scale,
        shared=ExpertCall(*map(linear_call, experts.shared or ())),
        shared_gate=linear_call(experts.shared_gate),
    )
    if experts.adapters is not None:
        call.gate_up_adapters, call.down_adapters = map(_table_of, experts.adapters)
        call.step_adapters = experts.adapters[0].step.call.buffer_info()[0]
        call.first_local, call.num_local = experts.first_expert, len(experts.downs)
    return call


def _table_of(adapters: ExpertAdapters) -> int:
    assert isinstance(adapters.layer, NativeLoraLayer)
    return adapters.layer.table


def linear_call(linear: Linear | None) -> LinearCall:
    """Return the structure of a linear layer, with or without adapters; None gives a structure without a kernel."""
    if linear is None:
        return LinearCall()
    if isinstance(linear, AdaptedLinear):
        assert isinstance(linear.layer, NativeLoraLayer)
        return linear.layer.as_call(linear_call(linear.linear), linear.step)
    assert isinstance(linear, NativeLinear)
    return linear.as_call()


def norm_scales(norm: RowNorm | HeadNorms | None) -> NormScales:
    """Return the structure of a norm, which points into the norm's scales."""
    if norm is None:
        return NormScales()
    return NormScales(TYPES[norm.scales.dtype], norm.scales.data_ptr(), len(norm.scales), norm.eps)


def can_fuse(layers: Sequence[PackedLayer]) -> bool:
    """Return whether all matmuls are native, and all attention of a cache group has the same number of heads."""
    attention = [(layer.group_idx, layer.mixer) for layer in layers if isinstance(layer.mixer, PackedAttention)]
    heads = {(group_idx, mixer.num_heads) for group_idx, mixer in attention}
    return len(heads) == len(dict(heads)) and all(map(_are_native, layers))


def can_fuse_experts(experts: RoutedExperts) -> bool:
    """Return whether all matmuls are native, with or without adapters."""
    return all(map(_is_native, _products_of_experts(experts)))


def _are_native(layer: PackedLayer) -> bool:
    mixer, ffn = layer.mixer, layer.ffn
    products: list[Linear] = [mixer.output]
    if isinstance(mixer, PackedAttention):
        products += [mixer.qkv, *([] if mixer.gate is None else [mixer.gate])]
    else:
        products.append(mixer.input)
    if isinstance(ffn, RoutedExperts):
        return can_fuse_experts(ffn) and all(map(_is_native, products))
    return all(map(_is_native, (*products, *ffn)))


def _is_native(linear: Linear) -> bool:
    """Return whether a linear layer is a native kernel, with or without adapters."""
    return isinstance(linear.linear if isinstance(linear, AdaptedLinear) else linear, NativeLinear)


def _products_of_experts(experts: RoutedExperts) -> Iterator[Linear]:
    yield experts.router
    yield from experts.gate_ups
    yield from experts.downs
    yield from experts.shared or ()
    if experts.shared_gate is not None:
        yield experts.shared_gate


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
