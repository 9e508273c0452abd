"""Qwen3 (dense): a norm on each query and key head instead of Qwen2's biases."""

from __future__ import annotations

from quire.models.families.hf_config import HFConfig
from quire.models.families.llama_layout import read_llama_layout
from quire.models.families.qwen2 import read_qwen_windows
from quire.models.specs.spec import ModelSpec, WeightMap


def qwen3(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `Qwen3ForCausalLM`."""
    has_bias = config.flag("attention_bias", False)
    return read_llama_layout(
        config,
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm="heads",
        head_dim=128,
        windows=read_qwen_windows(config),
    )
