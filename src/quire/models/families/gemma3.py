"""Gemma 3: windows in five layers of six, and norms before and after each half of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from quire.models.families.hf_config import (
    FULL,
    WINDOWED,
    HFConfig,
    read_activation,
    read_max_position,
    read_rope_part,
    read_windows,
    text_config,
)
from quire.models.families.llama_layout import map_weights, read_attention
from quire.models.specs.rotations import Rope
from quire.models.specs.spec import GatedMLP, ImageRows, LayerSpec, ModelSpec, RMSNorm, WeightMap

# Values of fields that checkpoints leave out.
DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
NORMS: Final[Mapping[str, str]] = {
    "mixer_norm": "input_layernorm",
    "mixer.output.norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn.down.norm": "post_feedforward_layernorm",
}


def gemma3(config: HFConfig, prefix: str = "model") -> tuple[ModelSpec, WeightMap]:
    """Read a `Gemma3ForCausalLM` whose tensors have a prefix; for errors, see `build`."""
    config = config.filled(DEFAULTS)
    config.require("use_bidirectional_attention", False)
    norm = RMSNorm(config.number("rms_norm_eps", 1e-6), zero_centred=True)
    has_bias = config.flag("attention_bias", False)
    rope, window_rope = read_ropes(config)
    attention = replace(
        read_attention(config, rope),
        qk_norm=norm,
        qkv_bias=has_bias,
        output_bias=has_bias,
        score_scale=config.number("query_pre_attn_scalar") ** -0.5,
    )
    mlp = GatedMLP(config.integer("intermediate_size"), activation=read_activation(config, "hidden_activation"))
    period = config.integer("sliding_window_pattern", 6)
    mixers = [
        attention if window is None else replace(attention, window=window, rope=window_rope)
        for window in read_windows(config, lambda idx: (idx + 1) % period != 0)
    ]
    spec = ModelSpec(
        vocab_size=config.integer("vocab_size"),
        width=config.integer("hidden_size"),
        layers=tuple(LayerSpec(norm, mixer, mlp, post_norm=norm) for mixer in mixers),
        norm=norm,
        tied_head=config.flag("tie_word_embeddings", True),
        max_position=read_max_position(config, rope),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logit_cap=config.number("final_logit_softcapping") if config.has("final_logit_softcapping") else None,
    )
    return spec, map_weights(spec, NORMS, prefix)


def gemma3_of_text_and_images(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read the language model of a `Gemma3ForConditionalGeneration`, without the vision encoder."""
    config.require("tie_word_embeddings", None, True)
    spec, names = gemma3(text_config(config), "language_model.model")
    return replace(spec, image_rows=ImageRows(see_each_other=True)), names


def read_ropes(config: HFConfig) -> tuple[Rope, Rope]:
    """Return the rotation of layers with full attention, and the rotation of layers with a window."""
    theta, window_theta = config.number("rope_theta", 1e6), config.number("rope_local_base_freq", 1e4)
    parts = config.part("rope_parameters")
    if parts is None:
        return read_rope_part(config, config.part("rope_scaling"), theta), Rope(window_theta)
    parts.require("rope_type", None)
    return read_rope_part(config, parts.part(FULL), theta), read_rope_part(config, parts.part(WINDOWED), window_theta)
