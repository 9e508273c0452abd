"""Architectures of Llama's layout: Llama, Mistral, SmolLM3, Seed-OSS, OLMo 2, MiniMax M2, Qwen2 and Qwen3."""

from __future__ import annotations

from typing import Final

from quire.errors import UnsupportedModel
from quire.models.families.hf_config import FULL, WINDOWED
from quire.models.gguf.architectures.common import (
    ATTENTION,
    ENDS,
    LLAMA,
    MLP,
    SIGMOID,
    expert_names,
    has_tensor,
    layers_with,
    paired_rows,
    read_common,
    read_dense,
    turned_fraction,
    whole_layers,
)
from quire.models.gguf.architectures.metadata import Metadata
from quire.models.gguf.architectures.sources import Architecture, Config, Floats, Shapes

MIXTRAL: Final = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    **expert_names("block_sparse_moe.experts", ("w1", "w3", "w2")),
}
MINIMAX_M2: Final = {**MIXTRAL, "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias"}
OLMO2: Final = {
    **ATTENTION,
    **MLP,
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
QWEN3_MOE: Final = {"mlp.gate": "ffn_gate_inp", **expert_names("mlp.experts")}


def _llama(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    """Read Llama and models with its architecture: Mistral, SmolLM, and with experts Mixtral."""
    config = read_common(metadata, shapes, "LlamaForCausalLM", floats, reads=("expert_count",))
    config |= whole_layers(metadata, config["head_dim"])
    if metadata.integer("attention.sliding_window", 0, least=0):
        config |= {
            "architectures": ["MistralForCausalLM"],
            "sliding_window": metadata.integer("attention.sliding_window"),
        }
    if metadata.integer("expert_count", 0, least=0):
        return config | {
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": metadata.integer("expert_count"),
            "num_experts_per_tok": metadata.integer("expert_used_count"),
        }
    return config | _biases(shapes)


def _mistral3(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    """Read Mistral 3, or Ministral 3, whose queries have a temperature in long contexts."""
    names = "attention.temperature_scale", "rope.scaling.yarn_log_multiplier"
    config = read_common(metadata, shapes, "MistralForCausalLM", floats, reads=names)
    config |= whole_layers(metadata, config["head_dim"])
    config["sliding_window"] = metadata.integer("attention.sliding_window", 0, least=0) or None
    weight, sharpening = map(metadata.number_or_none, names)
    rope = config["rope_parameters"]
    if sharpening is not None:
        rope |= {"mscale": 1.0, "mscale_all_dim": sharpening}
    if weight is None:
        return config
    if rope["rope_type"] != "yarn":
        raise UnsupportedModel(
            f"the field {metadata.key(names[0])} needs {metadata.key('rope.scaling.original_context_length')}",
            field=metadata.key(names[0]),
        )
    rope["llama_4_scaling_beta"] = weight
    return config | {"architectures": ["Ministral3ForCausalLM"]}


def _smollm3(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    """Read SmolLM3; every fourth layer is not rotated, which files do not say."""
    return read_dense(metadata, shapes, "SmolLM3ForCausalLM", floats) | _biases(shapes)


def _seed_oss(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    biases = _biases(shapes) | {"attention_out_bias": has_tensor(shapes, "attn_output.bias")}
    return read_dense(metadata, shapes, "SeedOssForCausalLM", floats) | biases


def _olmo2(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    """Read OLMo 2, or OLMo 3, which has windows."""
    config = read_dense(metadata, shapes, "Olmo2ForCausalLM", floats) | _biases(shapes)
    window = metadata.integer("attention.sliding_window", 0, least=0)
    if not window:
        return config
    rope = config["rope_parameters"]
    window_rope = {"rope_theta": metadata.number("rope.freq_base_swa", rope["rope_theta"])}
    return config | {
        "architectures": ["Olmo3ForCausalLM"],
        "layer_types": [WINDOWED if has_window else FULL for has_window in metadata.window_pattern(4)],
        "rope_parameters": {FULL: rope, WINDOWED: window_rope},
        "sliding_window": window,
    }


def _minimax_m2(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    reads = ("expert_count", "expert_gating_func")
    config = read_common(metadata, shapes, "MiniMaxM2ForCausalLM", floats, reads=reads)
    metadata.require("expert_gating_func", SIGMOID)
    rope = {"partial_rotary_factor": turned_fraction(metadata, config["head_dim"])}
    return config | {
        "rope_parameters": config["rope_parameters"] | rope,
        "intermediate_size": metadata.integer("expert_feed_forward_length"),
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
    }


def _biases(shapes: Shapes) -> Config:
    return {"attention_bias": has_tensor(shapes, "attn_q.bias"), "mlp_bias": has_tensor(shapes, "ffn_up.bias")}


def _qwen2(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    return read_dense(metadata, shapes, "Qwen2ForCausalLM", floats)


def _qwen3(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    bias = {"attention_bias": has_tensor(shapes, "attn_q.bias")}
    return read_dense(metadata, shapes, "Qwen3ForCausalLM", floats) | bias


def _qwen3_moe(metadata: Metadata, shapes: Shapes, floats: Floats | None) -> Config:
    """Read Qwen3 with experts in the layers that have a router."""
    config = read_common(metadata, shapes, "Qwen3MoeForCausalLM", floats, reads=("expert_count",))
    metadata.require("rope.dimension_count", config["head_dim"])
    width = metadata.integer("expert_feed_forward_length")
    has_experts = layers_with(shapes, config["num_hidden_layers"], "ffn_gate_inp.weight")
    has_width = metadata.has("feed_forward_length")
    return config | {
        "intermediate_size": metadata.same_integer("feed_forward_length") if has_width else width,
        "moe_intermediate_size": width,
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "norm_topk_prob": metadata.flag("expert_weights_norm", True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [idx for idx, has in enumerate(has_experts) if not has],
        "attention_bias": has_tensor(shapes, "attn_q.bias"),
    }


LLAMA_LAYOUT: Final[dict[str, Architecture]] = {
    "llama": Architecture(_llama, LLAMA | MIXTRAL, ENDS, paired_rows),
    "mistral3": Architecture(_mistral3, LLAMA, ENDS, paired_rows),
    "smollm3": Architecture(_smollm3, LLAMA, ENDS, paired_rows),
    "seed_oss": Architecture(_seed_oss, LLAMA | {"post_attention_layernorm": "post_attention_norm"}, ENDS),
    "olmo2": Architecture(_olmo2, OLMO2, ENDS),
    "minimax-m2": Architecture(_minimax_m2, LLAMA | MINIMAX_M2, ENDS),
    **dict.fromkeys(("qwen2", "qwen2vl"), Architecture(_qwen2, LLAMA, ENDS)),
    **dict.fromkeys(("qwen3", "qwen3vl"), Architecture(_qwen3, LLAMA, ENDS)),
    **dict.fromkeys(("qwen3moe", "qwen3vlmoe"), Architecture(_qwen3_moe, LLAMA | QWEN3_MOE, ENDS)),
}
