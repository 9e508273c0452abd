"""Qwen3 with experts: in every layer, or in some."""

from __future__ import annotations

from typing import Literal

from quire.models.families.expert_layout import read_counts, with_experts
from quire.models.families.hf_config import HFConfig, read_activation
from quire.models.families.llama_layout import read_llama_layout
from quire.models.specs.spec import Experts, ModelSpec, WeightMap

# Linear layers of each expert, or all experts of a layer in one tensor: [X, out, in] or [X, in, out].
ExpertStorage = Literal["linear", "rows", "columns"]


def qwen3_moe(config: HFConfig, storage: ExpertStorage = "linear") -> tuple[ModelSpec, WeightMap]:
    """Read a `Qwen3MoeForCausalLM`."""
    config.require("use_sliding_window", None, False)
    has_bias = config.flag("attention_bias", False)
    experts = Experts(
        *read_counts(config, 128, 8),
        config.integer("moe_intermediate_size", 768),
        renormalised=config.flag("norm_topk_prob", False),
        activation=read_activation(config),
        transposed=storage == "columns",
    )
    dense, step = config.indices("mlp_only_layers"), config.integer("decoder_sparse_step", 1)
    layers = [idx for idx in range(step - 1, config.integer("num_hidden_layers"), step) if idx not in dense]
    read = read_llama_layout(config, qkv_bias=has_bias, output_bias=has_bias, qk_norm="heads")
    return with_experts(read, experts, layers, "mlp", is_stacked=storage != "linear")
