"""GLM-4: Llama with gate and up in one, and half of each head rotated by neighbours; from 0414 on with post norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from quire.models.families.hf_config import HFConfig, read_partial_rope
from quire.models.families.llama_layout import NORMS, map_weights, read_attention, read_llama_layout
from quire.models.specs.spec import ModelSpec, RMSNorm, WeightMap

MLP: Final = {"ffn.gate_up": ("mlp.gate_up_proj",), "ffn.down": ("mlp.down_proj",)}
POST_NORMS: Final[Mapping[str, str]] = {
    "mixer.output.norm": "post_self_attn_layernorm",
    "ffn.down.norm": "post_mlp_layernorm",
}


def glm(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `GlmForCausalLM`."""
    config = config.filled({"rms_norm_eps": 1.5625e-7, "head_dim": 128})
    rope = read_partial_rope(config, read_attention(config, None).head_dim, 0.5, interleaved=True)
    # Llama's field is for all four projections, here it is for three.
    has_bias, config = config.flag("attention_bias", True), config.changed({"attention_bias": None})
    spec, _ = read_llama_layout(config, qkv_bias=has_bias, rope=rope)
    return spec, map_weights(spec, mlp=MLP)


def glm4(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `Glm4ForCausalLM`, which has norms after each half of a layer too."""
    spec, _ = glm(config)
    post_norm = RMSNorm(spec.norm.eps)
    spec = replace(spec, layers=tuple(replace(layer, post_norm=post_norm) for layer in spec.layers))
    return spec, map_weights(spec, {**NORMS, **POST_NORMS}, mlp=MLP)
