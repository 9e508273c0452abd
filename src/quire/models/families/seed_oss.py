"""Seed-OSS: Llama with biases of its own on queries, keys and values, and on the output of attention."""

from __future__ import annotations

from quire.models.families.hf_config import HFConfig
from quire.models.families.llama_layout import read_llama_layout
from quire.models.specs.spec import ModelSpec, WeightMap


def seed_oss(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `SeedOssForCausalLM`."""
    return read_llama_layout(
        # Llama's field is for all four projections, here it is for three.
        config.changed({"attention_bias": None}),
        qkv_bias=config.flag("attention_bias", True),
        output_bias=config.flag("attention_out_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        head_dim=128,
    )
