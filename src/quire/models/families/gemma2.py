"""Gemma 2: windows in every second layer, soft caps of scores, and norms before and after each half of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from quire.models.families.gemma3 import DEFAULTS as GEMMA3_DEFAULTS
from quire.models.families.gemma3 import NORMS
from quire.models.families.hf_config import HFConfig, read_activation, read_max_position, read_rope, read_windows
from quire.models.families.llama_layout import map_weights, read_attention
from quire.models.specs.spec import GatedMLP, LayerSpec, ModelSpec, RMSNorm, WeightMap

# Values of fields that checkpoints leave out.
DEFAULTS: Final[Mapping[str, Any]] = {**GEMMA3_DEFAULTS, "vocab_size": 256000, "max_position_embeddings": 8192}
# Soft caps of scores and of logits; null for none.
CAPS: Final[Mapping[str, float]] = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def gemma2(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `Gemma2ForCausalLM`; for errors, see `build`.

    Source: arXiv 2408.00118.
    """
    score_cap, logit_cap = (None if config.is_null(name) else config.number(name, cap) for name, cap in CAPS.items())
    config = config.filled(DEFAULTS)
    config.require("use_bidirectional_attention", None, False)
    norm = RMSNorm(config.number("rms_norm_eps", 1e-6), zero_centred=True)
    has_bias = config.flag("attention_bias", False)
    rope = read_rope(config)
    attention = replace(
        read_attention(config, rope, has_soft_cap=True),
        qkv_bias=has_bias,
        output_bias=has_bias,
        score_scale=config.number("query_pre_attn_scalar") ** -0.5,
        soft_cap=score_cap,
    )
    mlp = GatedMLP(config.integer("intermediate_size"), activation=read_activation(config, "hidden_activation"))
    windows = read_windows(config, lambda idx: idx % 2 == 0)
    spec = ModelSpec(
        vocab_size=config.integer("vocab_size"),
        width=config.integer("hidden_size"),
        layers=tuple(LayerSpec(norm, replace(attention, window=window), mlp, post_norm=norm) for window in windows),
        norm=norm,
        tied_head=config.flag("tie_word_embeddings", True),
        max_position=read_max_position(config, rope),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logit_cap=logit_cap,
    )
    return spec, map_weights(spec, NORMS)
