"""Granite 4 (dense): Mamba 2 and attention without positions, or attention alone, and multipliers everywhere."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from quire.errors import CheckpointError
from quire.models.families.hf_config import (
    FULL,
    HFConfig,
    read_layer_kinds,
    read_max_position,
    read_rope,
)
from quire.models.families.llama_layout import NORMS, OUTPUT, QKV, map_ends, map_modules, read_attention
from quire.models.spec import Attention, GatedMLP, LayerSpec, Mamba2, ModelSpec, RMSNorm, WeightMap

RECURRENT: Final = "linear_attention"
# Older checkpoints have other names for the kinds of layer.
OLDER: Final = {"attention": FULL, "mamba": RECURRENT}
# How checkpoints say that the length of a step has no limits.
NO_LIMITS: Final = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}], [0.0, "inf"])
MLP: Final = {"ffn.gate_up": ("shared_mlp.input_linear",), "ffn.down": ("shared_mlp.output_linear",)}
PROJECTIONS: Final = {"mixer.input": ("mamba.in_proj",), "mixer.output": ("mamba.out_proj",)}
CONV: Final = {"mixer.conv": ("mamba.conv1d",)}
HEADS: Final = {"decays": "A_log", "step_biases": "dt_bias", "skips": "D", "norm.weight": "norm.weight"}


def granitemoehybrid(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `GraniteMoeHybridForCausalLM`.

    Raises:
        CheckpointError: a field of the configuration is missing or of the wrong type.
        UnsupportedModel: the configuration asks for something that is not implemented: experts, say.
    """
    config = config.filled({"num_local_experts": 8, "hidden_act": "silu"})
    config.require("num_local_experts", 0)
    config.require("hidden_act", "silu")
    config.require("position_embedding_type", "rope", "nope")
    config.require("time_step_limit", *NO_LIMITS)
    norm = RMSNorm(config.number("rms_norm_eps", 1e-6))
    rope = read_rope(config) if config.text("position_embedding_type", "nope") == "rope" else None
    has_bias = config.flag("attention_bias", False)
    attention = replace(
        read_attention(config, rope),
        qkv_bias=has_bias,
        output_bias=has_bias,
        score_scale=config.number("attention_multiplier", 1.0),
    )
    kinds = read_layer_kinds(config, (FULL, RECURRENT), lambda _: RECURRENT, OLDER)
    mixers = {kind: attention if kind == FULL else _read_mamba(config, norm) for kind in kinds}
    mlp = GatedMLP(config.integer("shared_intermediate_size", 1024))
    spec = ModelSpec(
        vocab_size=config.integer("vocab_size"),
        width=config.integer("hidden_size"),
        layers=tuple(
            LayerSpec(norm, mixers[kind], mlp, residual_scale=config.number("residual_multiplier", 1.0))
            for kind in kinds
        ),
        norm=norm,
        tied_head=config.flag("tie_word_embeddings", False),
        max_position=read_max_position(config, rope),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )
    names = map_ends(spec)
    for idx, layer in enumerate(spec.layers):
        place = f"layers.{idx}", f"model.layers.{idx}"
        names |= map_modules(*place, {name: (norm,) for name, norm in NORMS.items()}) | map_modules(*place, MLP)
        if isinstance(layer.mixer, Attention):
            names |= map_modules(*place, QKV, has_bias=has_bias) | map_modules(*place, OUTPUT, has_bias=has_bias)
        elif isinstance(layer.mixer, Mamba2):
            names |= map_modules(*place, PROJECTIONS, has_bias=layer.mixer.bias)
            names |= map_modules(*place, CONV, has_bias=layer.mixer.conv_bias)
            names |= {
                f"layers.{idx}.mixer.{ours}": (f"model.layers.{idx}.mamba.{name}",) for ours, name in HEADS.items()
            }
    return spec, names


def _read_mamba(config: HFConfig, norm: RMSNorm) -> Mamba2:
    """Read the heads of a recurrent layer, which share its inner width."""
    inner = config.integer("hidden_size") * config.integer("mamba_expand", 2)
    num_heads, num_groups = config.integer("mamba_n_heads", 128), config.integer("mamba_n_groups", 1)
    head_dim = inner // num_heads
    config.require("mamba_d_head", "auto", head_dim)
    if head_dim * num_heads != inner or num_heads % num_groups:
        raise CheckpointError(
            f"config.json: mamba_n_heads must divide {inner} (mamba_expand times hidden_size) and be a multiple of "
            f"mamba_n_groups ({num_groups}), got {num_heads}",
            field="mamba_n_heads",
        )
    return Mamba2(
        num_heads,
        head_dim,
        num_groups,
        config.integer("mamba_d_state", 256),
        config.integer("mamba_d_conv", 4, least=2),
        norm,
        conv_bias=config.flag("mamba_conv_bias", True),
        bias=config.flag("mamba_proj_bias", False),
    )
