"""MiniMax M2: experts in every layer, norms of all query and all key heads, and a part of each head rotated."""

from __future__ import annotations

from typing import Final

from quire.models.families.expert_layout import read_counts, with_experts
from quire.models.families.hf_config import HFConfig, read_activation, read_partial_rope
from quire.models.families.llama_layout import read_attention, read_llama_layout
from quire.models.specs.spec import Experts, ModelSpec, WeightMap

MODULE: Final = "block_sparse_moe"


def minimax_m2(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `MiniMaxM2ForCausalLM`, without its heads for multi-token prediction."""
    config = config.filled({"rope_theta": 5e6, "head_dim": 128})
    config.require("use_qk_norm", None, True)
    config.require("qk_norm_type", None, "per_layer")
    config.require("scoring_func", None, "sigmoid")
    config.require("use_routing_bias", None, True)
    head_dim = read_attention(config, None).head_dim
    # The first checkpoints state the number of rotated values, not their fraction.
    rope = read_partial_rope(config, head_dim, config.integer("rotary_dim", head_dim) / head_dim)
    experts = Experts(
        *read_counts(config, 256, 8),
        config.integer("intermediate_size"),
        scoring="sigmoid",
        renormalised=True,
        activation=read_activation(config),
        choice_bias=True,
    )
    read = read_llama_layout(config, qk_norm="joint", rope=rope)
    num_layers = len(read[0].layers)
    spec, names = with_experts(read, experts, range(num_layers), MODULE, ("w1", "w3", "w2"))
    for idx in range(num_layers):
        names[f"layers.{idx}.ffn.choice_bias.weight"] = (f"model.layers.{idx}.{MODULE}.e_score_correction_bias",)
    return spec, names
