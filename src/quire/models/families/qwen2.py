"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and optional windows."""

from __future__ import annotations

from quire.models.families.hf_config import FULL, HFConfig, read_windows, refuse_layer_types
from quire.models.families.llama_layout import read_llama_layout
from quire.models.specs.spec import ModelSpec, WeightMap


def qwen2(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `Qwen2ForCausalLM`."""
    return read_llama_layout(config, qkv_bias=True, windows=read_qwen_windows(config))


def read_qwen_windows(config: HFConfig) -> tuple[int | None, ...]:
    """Read the windows of Qwen's layers: with `use_sliding_window`, layers from `max_window_layers` on have one."""
    window = config.integer_or_none("sliding_window", 4096) if config.flag("use_sliding_window", False) else None
    if window is None:
        refuse_layer_types(config, FULL)
        return (None,) * config.integer("num_hidden_layers")
    first = config.integer("max_window_layers", 28, least=0)
    return read_windows(config.filled({"sliding_window": window}), lambda idx: idx >= first)
