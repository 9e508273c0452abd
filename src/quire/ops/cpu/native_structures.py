"""Structures that native kernels read: rows, caches, layers. Each mirrors the C++ structure named in its docstring."""

from __future__ import annotations

import ctypes

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class StepRows(ctypes.Structure):
    """The rows of a step, from an `AttentionBatch` (`StepRows` in cache.h)."""

    _fields_ = (
        ("num_seqs", _INT),
        ("row_starts", _POINTER),
        ("context_lens", _POINTER),
        ("block_starts", _POINTER),
        ("block_ids", _POINTER),
        ("slot_mapping", _POINTER),
    )


class Cache(ctypes.Structure):
    """The blocks of a cache group; strides in bytes (`Cache` in cache.h)."""

    _fields_ = (
        ("data", _POINTER),
        ("type", _INT),
        ("is_quantised", _INT),
        ("block_stride", _INT),
        ("layer_stride", _INT),
        ("slot_bytes", _INT),
        ("num_kv_heads", _INT),
        ("block_size", _INT),
        ("head_dim", _INT),
    )


class LinearCall(ctypes.Structure):
    """A linear layer (`Linear` in linear_call.h)."""

    _fields_ = (
        ("kernel", _POINTER),
        ("packed", _POINTER),
        ("num_columns", _INT),
        ("width", _INT),
        ("bias", _POINTER),
        ("gate", _INT),
    )


class NormScales(ctypes.Structure):
    """Scales of a norm, or of the norms of heads (QK norms) (`Norm` in layers.cpp)."""

    _fields_ = (("type", _INT), ("scales", _POINTER), ("num_heads", _INT), ("eps", _DOUBLE))


class AttentionCall(ctypes.Structure):
    """Attention between its projections (`Attention` in layers.cpp)."""

    _fields_ = (
        ("head_norms", NormScales),
        ("rotation_idx", _INT),
        ("num_heads", _INT),
        ("score_scale", _DOUBLE),
        ("soft_cap", _DOUBLE),
        ("sinks", _POINTER),
        ("gate", LinearCall),
    )


class StateRows(ctypes.Structure):
    """Sequences of a step with their recurrent states (`StateRows` in states.h)."""

    _fields_ = (
        ("num_seqs", _INT),
        ("block_ids", _POINTER),
        ("first_rows", _POINTER),
        ("num_rows", _POINTER),
        ("has_state", _POINTER),
    )


class StateCache(ctypes.Structure):
    """The states of a cache group; strides in bytes (`StateCache` in states.h)."""

    _fields_ = (
        ("conv_states", _POINTER),
        ("ssm_states", _POINTER),
        ("block_stride", _INT),
        ("layer_stride", _INT),
        ("num_columns", _INT),
    )


class ConvolutionCall(ctypes.Structure):
    """A causal convolution (`Convolution` in states.h)."""

    _fields_ = (("taps", _POINTER), ("bias", _POINTER), ("num_channels", _INT))


class ShortConvCall(ctypes.Structure):
    """A gated short convolution between its projections (`ShortConv` in states.h)."""

    _fields_ = (("conv", ConvolutionCall),)


class GatedDeltaNetCall(ctypes.Structure):
    """A gated delta net between its projections (`GatedDeltaNet` in states.h)."""

    _fields_ = (
        ("conv", ConvolutionCall),
        ("decay_rates", _POINTER),
        ("dt_bias", _POINTER),
        ("norm_scales", _POINTER),
        ("norm_eps", _DOUBLE),
        ("num_key_heads", _INT),
        ("num_heads", _INT),
        ("key_dim", _INT),
        ("value_dim", _INT),
    )


class ExpertCall(ctypes.Structure):
    """An expert (`Expert` in experts.h)."""

    _fields_ = (("gate_up", LinearCall), ("down", LinearCall))


class ExpertsCall(ctypes.Structure):
    """Experts with a router (`Experts` in experts.h)."""

    _fields_ = (
        ("router", LinearCall),
        ("choice_bias", _POINTER),
        ("expert_scales", _POINTER),
        ("experts", ctypes.POINTER(ExpertCall)),
        ("num_experts", _INT),
        ("num_chosen", _INT),
        ("is_sigmoid", _INT),
        ("is_renormalised", _INT),
        ("is_input_scaled", _INT),
        ("sum_eps", _DOUBLE),
        ("score_scale", _DOUBLE),
        ("logit_scale", _DOUBLE),
        ("shared", ExpertCall),
        ("shared_gate", LinearCall),
        ("gate_up_adapters", _POINTER),
        ("down_adapters", _POINTER),
        ("step_adapters", _POINTER),
        ("first_local", _INT),
        ("num_local", _INT),
    )


class LayerCall(ctypes.Structure):
    """A layer with one of the mixers, and with experts or a gated MLP (`Layer` in layers.cpp)."""

    _fields_ = (
        ("mixer_norm", NormScales),
        ("input", LinearCall),
        ("attention", ctypes.POINTER(AttentionCall)),
        ("short_conv", ctypes.POINTER(ShortConvCall)),
        ("delta_net", ctypes.POINTER(GatedDeltaNetCall)),
        ("group_idx", _INT),
        ("layer_idx", _INT),
        ("output", LinearCall),
        ("ffn_norm", NormScales),
        ("experts", ctypes.POINTER(ExpertsCall)),
        ("gate_up", LinearCall),
        ("down", LinearCall),
    )
