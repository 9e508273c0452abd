"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from typing import Any, Final

from quire.models.families.expert_layout import read_counts, with_experts
from quire.models.families.hf_config import FULL, WINDOWED, HFConfig, read_activation, refuse_layer_types
from quire.models.families.llama_layout import read_llama_layout
from quire.models.specs.spec import Experts, ModelSpec, WeightMap

# Values of fields that checkpoints may leave out.
DEFAULTS: Final[dict[str, Any]] = {"rope_theta": 1e6, "rms_norm_eps": 1e-5}


def mixtral(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `MixtralForCausalLM`."""
    config = config.filled(DEFAULTS)
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    refuse_layer_types(config, FULL if window is None else WINDOWED)
    num_layers = config.integer("num_hidden_layers")
    experts = Experts(
        *read_counts(config, 8, 2),
        config.integer("intermediate_size"),
        renormalised=True,
        activation=read_activation(config),
    )
    read = read_llama_layout(config, windows=(window,) * num_layers)
    return with_experts(read, experts, range(num_layers), "block_sparse_moe", ("w1", "w3", "w2"))
