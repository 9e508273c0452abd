"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from quire.errors import UnsupportedModel
from quire.models.families.hf_config import HFConfig
from quire.models.families.llama_layout import read_llama_layout
from quire.models.spec import ModelSpec, WeightMap


def qwen2(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `Qwen2ForCausalLM`.

    Raises:
        CheckpointError: a field of the configuration is missing or of the wrong type.
        UnsupportedModel: the configuration asks for something that is not implemented.
    """
    refuse_sliding_window(config)
    return read_llama_layout(config, qkv_bias=True)


def refuse_sliding_window(config: HFConfig) -> None:
    """Refuse a checkpoint in which some layer attends to a window only.

    Raises:
        UnsupportedModel: `use_sliding_window` reaches a layer.
    """
    in_force = config.flag("use_sliding_window", False) and config.has("sliding_window")
    if in_force and config.integer("max_window_layers", 28) < config.integer("num_hidden_layers"):
        raise UnsupportedModel(
            "config.json: use_sliding_window is true, but sliding windows are not implemented for this family",
            field="use_sliding_window",
        )
