"""Mistral 7B and its successors: Llama without biases; the first release has a window in every layer."""

from __future__ import annotations

from quire.models.families.hf_config import FULL, WINDOWED, HFConfig, refuse_layer_types
from quire.models.families.llama_layout import read_llama_layout
from quire.models.specs.spec import ModelSpec, WeightMap


def mistral(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `MistralForCausalLM`."""
    window = config.integer_or_none("sliding_window", 4096)
    refuse_layer_types(config, FULL if window is None else WINDOWED)
    return read_llama_layout(config, windows=(window,) * config.integer("num_hidden_layers"))
