"""Shapes of models that `benchmarks.make_gguf` writes: their tensors and the metadata of their architecture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# A smaller Qwen3 with experts: 1.8 billion parameters, of which a token takes 440 million.
QWEN3_EXPERTS: dict[str, Any] = {
    "model_type": "qwen3moe",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "intermediate_size": 512,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
# Qwen3.5 of 24 layers: three gated delta nets, then attention.
QWEN3_5: dict[str, Any] = {
    "model_type": "qwen35",
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "full_attention_interval": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "rotary_dim": 64,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000.0,
}
SHAPES = {"qwen3-experts": QWEN3_EXPERTS, "qwen3.5-0.8b": QWEN3_5}
# Tensors that stay in float32, besides those of one dimension.
FLOATS = ("ffn_gate_inp.weight", "ssm_conv1d.weight")
Shape = tuple[int, ...]


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Yield the names and shapes of a model's tensors, norms first in each layer."""
    width = config["hidden_size"]
    yield "token_embd.weight", (config["vocab_size"], width)
    yield "output_norm.weight", (width,)
    is_hybrid = "full_attention_interval" in config
    for idx in range(config["num_hidden_layers"]):
        is_recurrent = is_hybrid and (idx + 1) % config["full_attention_interval"]
        mixer = _delta_net(config) if is_recurrent else _attention(config)
        second_norm = "post_attention_norm.weight" if is_hybrid else "ffn_norm.weight"
        parts = {"attn_norm.weight": (width,), second_norm: (width,), **mixer, **_ffn(config)}
        for name, shape in parts.items():
            yield f"blk.{idx}.{name}", shape


def _attention(config: dict[str, Any]) -> dict[str, Shape]:
    width, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    has_gate = "full_attention_interval" in config
    return {
        "attn_q.weight": (heads * dim * (2 if has_gate else 1), width),
        "attn_k.weight": (kv_heads * dim, width),
        "attn_v.weight": (kv_heads * dim, width),
        "attn_q_norm.weight": (dim,),
        "attn_k_norm.weight": (dim,),
        "attn_output.weight": (width, heads * dim),
    }


def _delta_net(config: dict[str, Any]) -> dict[str, Shape]:
    width, dim = config["hidden_size"], config["linear_head_dim"]
    heads, key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    channels = (2 * key_heads + heads) * dim
    return {
        "attn_qkv.weight": (channels, width),
        "attn_gate.weight": (heads * dim, width),
        "ssm_beta.weight": (heads, width),
        "ssm_alpha.weight": (heads, width),
        "ssm_conv1d.weight": (channels, config["linear_conv_kernel_dim"]),
        "ssm_dt.bias": (heads,),
        "ssm_a": (heads,),
        "ssm_norm.weight": (dim,),
        "ssm_out.weight": (width, heads * dim),
    }


def _ffn(config: dict[str, Any]) -> dict[str, Shape]:
    width = config["hidden_size"]
    if "num_experts" not in config:
        mlp = config["intermediate_size"]
        return {
            "ffn_gate.weight": (mlp, width),
            "ffn_up.weight": (mlp, width),
            "ffn_down.weight": (width, mlp),
        }
    num_experts, mlp = config["num_experts"], config["moe_intermediate_size"]
    return {
        "ffn_gate_inp.weight": (num_experts, width),
        "ffn_gate_exps.weight": (num_experts, mlp, width),
        "ffn_up_exps.weight": (num_experts, mlp, width),
        "ffn_down_exps.weight": (num_experts, width, mlp),
    }


def add_metadata(writer: Any, config: dict[str, Any]) -> None:
    """Add the fields of a model's architecture to a `gguf.GGUFWriter`."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "full_attention_interval" in config:
        writer.add_rope_dimension_count(config["rotary_dim"])
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_head_dim"])
        writer.add_uint32(f"{config['model_type']}.full_attention_interval", config["full_attention_interval"])
