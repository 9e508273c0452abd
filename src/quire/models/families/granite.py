"""Granite 3: Llama with multipliers, dense or with experts."""

from __future__ import annotations

from quire.models.families.granitemoehybrid import granitemoehybrid, read_multipliers
from quire.models.families.hf_config import FULL, HFConfig, refuse_layer_types
from quire.models.families.llama_layout import read_llama_layout
from quire.models.specs.spec import ModelSpec, WeightMap


def granite(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `GraniteForCausalLM`."""
    has_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    spec, names = read_llama_layout(config, qkv_bias=has_bias, output_bias=has_bias, mlp_bias=mlp_bias)
    return read_multipliers(config, spec), names


def granitemoe(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `GraniteMoeForCausalLM`, which has no shared expert."""
    return granitemoeshared(config.changed({"shared_intermediate_size": 0}))


def granitemoeshared(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `GraniteMoeSharedForCausalLM`: the layers of Granite 4 with attention, all rotated."""
    refuse_layer_types(config, FULL)
    return granitemoehybrid(
        config.changed(
            {
                "layer_types": [FULL] * config.integer("num_hidden_layers"),
                "num_local_experts": config.integer("num_local_experts", 8),
                "position_embedding_type": "rope",
                "shared_intermediate_size": config.count("shared_intermediate_size", 0),
            }
        )
    )
