"""GLM-4.5 and 4.6: experts and a shared expert after the first layers, half of each head rotated."""

from __future__ import annotations

from typing import Final

from quire.errors import CheckpointError
from quire.models.families.expert_layout import read_counts, with_experts
from quire.models.families.hf_config import HFConfig, read_activation, read_partial_rope
from quire.models.families.llama_layout import map_modules, read_attention, read_llama_layout
from quire.models.specs.spec import Experts, ModelSpec, WeightMap

SHARED: Final = {
    "ffn.shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "ffn.shared.down": ("mlp.shared_experts.down_proj",),
}
# Added to the sum by which the chosen scores are divided.
SUM_EPS: Final = 1e-20


def glm4_moe(config: HFConfig) -> tuple[ModelSpec, WeightMap]:
    """Read a `Glm4MoeForCausalLM`, without its head for multi-token prediction."""
    config = config.filled({"rms_norm_eps": 1e-5, "n_routed_experts": 128})
    for field in ("n_group", "topk_group"):
        config.require(field, None, 1)
    rope = read_partial_rope(config, read_attention(config, None).head_dim, 0.5)
    read = read_llama_layout(
        # Llama's field is for all four projections, here it is for three.
        config.changed({"attention_bias": None}),
        qkv_bias=config.flag("attention_bias", False),
        qk_norm="heads" if config.flag("use_qk_norm", False) else None,
        rope=rope,
    )
    is_normed, width = config.flag("norm_topk_prob", True), config.integer("moe_intermediate_size", 1408)
    experts = Experts(
        *read_counts(config.changed({"num_experts": config.integer("n_routed_experts")}), chosen=8),
        width,
        scoring="sigmoid",
        renormalised=is_normed,
        shared_width=width * config.count("n_shared_experts", 1),
        activation=read_activation(config),
        choice_bias=True,
        sum_eps=SUM_EPS if is_normed else 0.0,
        score_scale=config.number("routed_scaling_factor", 1.0),
    )
    num_layers, first = len(read[0].layers), config.count("first_k_dense_replace", 1)
    if first >= num_layers:
        raise CheckpointError(
            f"config.json: first_k_dense_replace must leave one of {num_layers} layers for experts, got {first}",
            field="first_k_dense_replace",
        )
    spec, names = with_experts(read, experts, range(first, num_layers), "mlp")
    for idx in range(first, num_layers):
        if experts.shared_width:
            names |= map_modules(f"layers.{idx}", f"model.layers.{idx}", SHARED)
        names[f"layers.{idx}.ffn.choice_bias.weight"] = (f"model.layers.{idx}.mlp.gate.e_score_correction_bias",)
    return spec, names
