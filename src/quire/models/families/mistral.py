"""Mistral 7B and its kin: Llama without biases; the first release attends to a window."""

from __future__ import annotations

from dataclasses import replace

from quire.models.families.hf_config import HFConfig
from quire.models.families.llama_layout import read_llama_layout
from quire.models.spec import ModelSpec, WeightMap


def mistral(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `MistralForCausalLM`.

    Raises:
        CheckpointError: a field of the configuration is missing or of the wrong type.
        UnsupportedModel: the configuration asks for something that is not implemented.
    """
    spec, weights = read_llama_layout(config)
    if config.has("sliding_window"):
        # Up to the window's length, windowed and full attention are the same; past it they differ, so we stop there.
        spec = replace(spec, max_position=min(spec.max_position, config.integer("sliding_window")))
    return spec, weights
