"""Qwen3-Next: Qwen3.5 with experts, whose delta nets have their input projections in groups of a key head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from quire.models.families.hf_config import HFConfig
from quire.models.families.qwen3_5_moe import qwen3_5_moe
from quire.models.specs.spec import GatedDeltaNet, ModelSpec, WeightMap

# Values of fields that checkpoints leave out, if they differ from Qwen3.5's.
DEFAULTS: Final[Mapping[str, Any]] = {
    "vocab_size": 151936,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 10,
    "num_experts": 512,
}
INPUTS: Final = ("in_proj_qkvz", "in_proj_ba")
# Field that is added to the configuration of files with queries, keys and values in one projection, gates in another.
SPLIT_INPUTS: Final = "delta_net_inputs_are_split"
SPLIT: Final = ("in_proj_qkv", "in_proj_z", "in_proj_ba")


def qwen3_next(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `Qwen3NextForCausalLM`, without its head for multi-token prediction."""
    spec, names = qwen3_5_moe(config.filled(DEFAULTS))
    is_split = config.flag(SPLIT_INPUTS, False)
    layers = []
    for idx, layer in enumerate(spec.layers):
        if isinstance(layer.mixer, GatedDeltaNet):
            layer = replace(layer, mixer=replace(layer.mixer, by_key_head=not is_split))
            module, parts = f"model.layers.{idx}.linear_attn", SPLIT if is_split else INPUTS
            names[f"layers.{idx}.mixer.input.weight"] = tuple(f"{module}.{part}.weight" for part in parts)
        layers.append(layer)
    return replace(spec, layers=tuple(layers)), names
