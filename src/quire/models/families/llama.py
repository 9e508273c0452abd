"""Llama 2, 3 and 3.x."""

from __future__ import annotations

from quire.models.families.hf_config import HFConfig
from quire.models.families.llama_layout import read_llama_layout
from quire.models.specs.spec import ModelSpec, WeightMap


def llama(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `LlamaForCausalLM`."""
    # One flag gives all four projections of attention a bias.
    has_bias = config.flag("attention_bias", False)
    return read_llama_layout(config, qkv_bias=has_bias, output_bias=has_bias, mlp_bias=config.flag("mlp_bias", False))
