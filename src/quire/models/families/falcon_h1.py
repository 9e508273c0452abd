"""Falcon-H1: attention and Mamba 2 side by side in every layer, and multipliers everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from quire.errors import UnsupportedModel
from quire.models.families.hf_config import HFConfig, read_max_position, read_rope, refuse_layer_types
from quire.models.families.llama_layout import map_ends, map_modules, read_attention
from quire.models.families.mamba_layout import map_mamba2, read_mamba2
from quire.models.specs.spec import Attention, GatedMLP, LayerSpec, Mamba2, ModelSpec, Parallel, RMSNorm, WeightMap

NORMS: Final = {"mixer_norm": ("input_layernorm",), "ffn_norm": ("pre_ff_layernorm",)}
ATTENTION: Final = {
    "mixer.0.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mixer.0.output": ("self_attn.o_proj",),
}
MLP: Final = {
    "ffn.gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "ffn.down": ("feed_forward.down_proj",),
}


def falcon_h1(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `FalconH1ForCausalLM`."""
    config.require("attn_layer_indices", None)
    config.require("mamba_use_mlp", True)
    refuse_layer_types(config, "hybrid")
    norm = RMSNorm(config.number("rms_norm_eps", 1e-5))
    in_scale = _read_input_scale(config, "attention_in_multiplier", "attention_bias")
    attention, mamba = _read_attention(config, in_scale), _read_mamba(config, norm)
    mixers = Parallel(
        (attention, mamba),
        (in_scale * config.number("attention_out_multiplier", 1.0), config.number("ssm_out_multiplier", 1.0)),
    )
    gate_scale, ffn_scale = config.numbers("mlp_multipliers", (1.0, 1.0))
    mlp = GatedMLP(config.integer("intermediate_size"), config.flag("mlp_bias", False), gate_scale=gate_scale)
    spec = ModelSpec(
        vocab_size=config.integer("vocab_size"),
        width=config.integer("hidden_size"),
        layers=(LayerSpec(norm, mixers, mlp, ffn_scale=ffn_scale),) * config.integer("num_hidden_layers"),
        norm=norm,
        tied_head=config.flag("tie_word_embeddings", False),
        max_position=read_max_position(config, attention.rope),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=config.number("lm_head_multiplier", 1.0),
    )
    names = map_ends(spec, norm="final_layernorm")
    for idx in range(len(spec.layers)):
        layer_names = ours, theirs = f"layers.{idx}", f"model.layers.{idx}"
        names |= map_modules(*layer_names, NORMS) | map_modules(*layer_names, MLP, has_bias=mlp.bias)
        names |= map_modules(*layer_names, ATTENTION, has_bias=attention.qkv_bias)
        names |= map_mamba2(f"{ours}.mixer.1", f"{theirs}.mamba", mamba)
    return spec, names


def _read_attention(config: HFConfig, in_scale: float) -> Attention:
    """Read the attention; its scores take the keys' multiplier, and the input's squared (of queries and keys)."""
    has_bias = config.flag("attention_bias", False)
    attention = read_attention(config, read_rope(config))
    score_scale = attention.head_dim**-0.5 * config.number("key_multiplier", 1.0) * in_scale**2
    return replace(attention, qkv_bias=has_bias, output_bias=has_bias, score_scale=score_scale)


def _read_mamba(config: HFConfig, norm: RMSNorm) -> Mamba2:
    """Read the heads; the input's multiplier becomes a factor of each projected part."""
    inner = config.integer_or_none("mamba_d_ssm", missing=1024)
    if inner is None:
        inner = config.integer("hidden_size") * config.integer("mamba_expand", 2)
    has_norm = config.flag("mamba_rms_norm", False)
    if has_norm:
        config.filled({"mamba_norm_before_gate": True}).require("mamba_norm_before_gate", False)
    gates, values, writes, reads, steps = config.numbers("ssm_multipliers", (1.0,) * 5)
    scale = _read_input_scale(config, "ssm_in_multiplier", "mamba_proj_bias")
    return replace(
        read_mamba2(config, inner, norm if has_norm else None),
        output_bias=config.flag("projectors_bias", False),
        scales=(scale * gates, scale * values, scale * writes, scale * reads, scale * steps),
    )


def _read_input_scale(config: HFConfig, name: str, bias: str) -> float:
    """Read the multiplier of a projection's input, which can multiply its output unless the projection has a bias."""
    scale = config.number(name, 1.0)
    if scale != 1.0 and config.flag(bias, False):
        raise UnsupportedModel(
            f"config.json: {bias} is true, but with a {name} of {scale} only false is implemented", field=bias
        )
    return scale
