"""GLM-4, with gate and up in one matrix, from 0414 on with post norms; and GLM-4.5 and 4.6, with experts."""

from __future__ import annotations

from functools import partial
from typing import Final

from quire.models.gguf.architectures.common import (
    ATTENTION,
    ENDS,
    LLAMA,
    NORMS,
    SIGMOID,
    expert_names,
    has_tensor,
    read_common,
    read_experts,
    turned_fraction,
)
from quire.models.gguf.architectures.metadata import Metadata
from quire.models.gguf.architectures.sources import Architecture, Config, Floats, Shapes

CHATGLM: Final = {**ATTENTION, **NORMS, "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
GLM4: Final = {
    **CHATGLM,
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
GLM4_MOE: Final = {
    **LLAMA,
    "post_attention_layernorm": "post_attention_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **expert_names("mlp.experts"),
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}


def _read_glm4(metadata: Metadata, shapes: Shapes, floats: Floats | None, family: str = "Glm4ForCausalLM") -> Config:
    metadata.require("nextn_predict_layers", 0)
    config = read_common(metadata, shapes, family, floats)
    metadata.same_integer("attention.head_count_kv")
    return _attention(metadata, shapes, config) | {"intermediate_size": metadata.same_integer("feed_forward_length")}


def _read_glm4_moe(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    """Read the layers without those for multi-token prediction, which come last."""
    reads = ("expert_count", "expert_gating_func", "expert_shared_count", "expert_weights_scale")
    config = read_common(metadata, shapes, "Glm4MoeForCausalLM", floats, reads=reads)
    metadata.require("expert_gating_func", SIGMOID)
    num_blocks = metadata.num_blocks
    num_layers = num_blocks - metadata.integer("nextn_predict_layers", 0, least=0, most=num_blocks - 1)
    experts = read_experts(metadata, shapes)
    return (
        _attention(metadata, shapes, config)
        | experts
        | {
            "num_hidden_layers": num_layers,
            "intermediate_size": metadata.same_integer("feed_forward_length"),
            "first_k_dense_replace": metadata.integer("leading_dense_block_count", least=0, most=num_layers - 1),
            "n_routed_experts": experts["num_experts"],
            "n_shared_experts": metadata.integer("expert_shared_count", 0, least=0),
            "norm_topk_prob": metadata.flag("expert_weights_norm", False),
            "routed_scaling_factor": metadata.number_or_none("expert_weights_scale") or 1.0,
            "use_qk_norm": has_tensor(shapes, "attn_q_norm.weight"),
        }
    )


def _attention(metadata: Metadata, shapes: Shapes, config: Config) -> Config:
    rope = {"partial_rotary_factor": turned_fraction(metadata, config["head_dim"])}
    return config | {
        "attention_bias": has_tensor(shapes, "attn_q.bias"),
        "rope_parameters": config["rope_parameters"] | rope,
    }


GLM: Final = {
    "chatglm": Architecture(partial(_read_glm4, family="GlmForCausalLM"), CHATGLM, ENDS),
    "glm4": Architecture(_read_glm4, GLM4, ENDS),
    "glm4moe": Architecture(_read_glm4_moe, GLM4_MOE, ENDS),
}
