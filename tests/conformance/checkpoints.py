"""Tiny random checkpoints of every family, made with transformers, and what transformers itself generates from them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 199
EOS_TOKEN_ID = 7
NEW_TOKENS = 24

_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": EOS_TOKEN_ID,
    "bos_token_id": 1,
    "pad_token_id": 0,
    # Random weights of the usual size give logits so flat that every model would repeat one token.
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Every multiplier is another number.
FALCON = {
    "num_hidden_layers": 2,
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "embedding_multiplier": 5.0,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.2,
    "ssm_multipliers": [0.6, 0.7, 0.8, 0.75, 0.9],
    "ssm_out_multiplier": 0.8,
    "mlp_multipliers": [0.88, 0.6],
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {**_SMALL, "num_key_value_heads": 4}),
    "llama3": ("Llama", {**_SMALL, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True, "head_dim": 32}),
    "qwen2": ("Qwen2", {**_SMALL, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**_SMALL, "head_dim": 24, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {**_SMALL, "sliding_window": None}),
    # Learned positions, layer norms, plain MLPs, biases everywhere.
    "gpt2": ("GPT2", _SMALL | {"scale_attn_by_inverse_layer_idx": True}),
    # A temperature from token 30 on.
    "ministral3": (
        "Ministral3",
        {
            **_SMALL,
            "head_dim": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 30,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    # Experts without a shared one, and a factor of what they give.
    "granitemoe": (
        "GraniteMoe",
        {
            **_SMALL,
            "num_local_experts": 6,
            "intermediate_size": 48,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    # Norms of all heads of a token together, and after each half of a layer; windows in three layers of four.
    "olmo3": ("Olmo3", {**_SMALL, "num_hidden_layers": 4, "sliding_window": 11}),
    "minimax-m2": (
        "MiniMaxM2",
        {
            **_SMALL,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rotary_dim": 8,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 48,
        },
    ),
    # A sigmoid of scores, of which a bias chooses, beside a shared expert; a dense layer before, and parts of heads.
    "glm4-moe": (
        "Glm4Moe",
        {
            **_SMALL,
            "head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "routed_scaling_factor": 1.5,
        },
    ),
    # Windows shorter than the prompts, of full layers too and of some layers only.
    "mistral-window": ("Mistral", {**_SMALL, "sliding_window": 11}),
    "qwen2-window": ("Qwen2", {**_SMALL, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "gemma2": (
        "Gemma2",
        {
            **_SMALL,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 11,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 0.7,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {**_SMALL, "num_hidden_layers": 7, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 24},
    ),
    # Several hidden states of a token, per-layer inputs, sparse gates, and caches that are shared.
    "gemma3n": (
        "Gemma3n",
        {
            **_SMALL,
            "num_hidden_layers": 6,
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "sliding_window": 11,
            "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.0, 0.0],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 150,
            "laurel_rank": 12,
        },
    ),
    # Layers that read the cache of another, with a window and without; heads of two shapes.
    "gemma4": (
        "Gemma4",
        {
            **_SMALL,
            "num_hidden_layers": 7,
            "head_dim": 16,
            "global_head_dim": 24,
            "layer_types": [
                *["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
                *["sliding_attention", "sliding_attention", "full_attention"],
            ],
            "num_kv_shared_layers": 3,
            "sliding_window": 11,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
        },
    ),
    # Values made of what makes the keys, fewer KV heads where all tokens are seen; nothing is shared.
    "gemma4-keys-as-values": (
        "Gemma4",
        {
            **_SMALL,
            "num_global_key_value_heads": 1,
            "head_dim": 16,
            "global_head_dim": 32,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 20,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
        },
    ),
    # Experts beside the MLPs, whose router has scales of its own; what the plain one has, besides.
    "gemma4-moe": (
        "Gemma4",
        {
            **_SMALL,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "global_head_dim": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "sliding_window": 11,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
    # Chunks that prompts and answers cross, no multiple of most blocks; experts, and a temperature from token 20 on.
    "llama4": (
        "Llama4",
        {
            **_SMALL,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 20,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "intermediate_size": 48,
            "intermediate_size_mlp": 96,
            "floor_scale": 20,
            "attn_scale": 0.4,
        },
    ),
    # Short convolutions, a selective state space, and gated delta nets, beside attention.
    "lfm2": (
        "Lfm2",
        {**_SMALL, "num_hidden_layers": 5, "full_attn_idxs": [2, 4], "block_multiple_of": 8},
    ),
    "granite4": (
        "GraniteMoeHybrid",
        {
            **_SMALL,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "mamba_expand": 1,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "granite4-moe": (
        "GraniteMoeHybrid",
        {
            **_SMALL,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 48,
            "shared_intermediate_size": 96,
            "mamba_expand": 1,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "qwen3.5": (
        "Qwen3_5",
        {
            **_SMALL,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "full_attention_interval": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    # Attention sinks, a window in every second layer, and experts with biases.
    "gpt-oss": (
        "GptOss",
        {
            **_SMALL,
            "head_dim": 16,
            "sliding_window": 20,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    # Fused projections, a window, and a part of each head that turns by factors of LongRoPE.
    "phi3": (
        "Phi3",
        {
            **_SMALL,
            "sliding_window": 30,
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "attention_factor": 1.1,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
                "long_factor": [1.0] * 6,
            },
        },
    ),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {
            **_SMALL,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "full_attention_interval": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            **_SMALL,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    # A half of a layer each: Mamba 2, attention, plain MLPs, and plain experts beside a shared one.
    "nemotron-h": (
        "NemotronH",
        {
            **{name: value for name, value in _SMALL.items() if name != "num_hidden_layers"},
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "moe"],
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "n_routed_experts": 6,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 64,
            "routed_scaling_factor": 2.5,
            # The least step of transformers in prompts, not in decodes.
            "time_step_min": 1e-9,
        },
    ),
    "bamba": (
        "Bamba",
        {
            **_SMALL,
            "attn_layer_indices": [1],
            "mamba_expand": 1,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            **_SMALL,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
    ),
    # Both side by side in every layer; gated with a norm, and without one.
    "falcon-h1": ("FalconH1", {**_SMALL, **FALCON}),
    "falcon-h1-norm": (
        "FalconH1",
        {
            **_SMALL,
            **FALCON,
            "mamba_d_ssm": None,
            "mamba_expand": 1,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
    ),
}

# Families that neither ranks nor stages share.
UNSHARED = frozenset({"gemma3n"})

# How many times larger a pool must be for the same sequences, since states lie in it too.
POOL_FACTORS = {
    **dict.fromkeys(("lfm2", "lfm2-moe"), 2),
    **dict.fromkeys(("granite4", "granite4-moe", "falcon-h1", "falcon-h1-norm", "qwen3.5", "qwen3.5-moe"), 4),
    **dict.fromkeys(("bamba", "nemotron-h", "qwen3-next"), 4),
}


def save_checkpoint(family: str, folder: Path, **changes: Any) -> Path:
    """Write a family's random checkpoint to a folder, with some fields of its configuration changed."""
    name, options = FAMILIES[family]
    model_class = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    torch.manual_seed(20)
    model = model_class(model_class.config_class(**options | changes))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() == 1:  # biases, norms and the scales of layers
                tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(folder)
    return folder


def ragged_prompts() -> list[list[int]]:
    """Return prompts of many lengths; some begin alike, so that they share blocks."""
    rng = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, VOCAB_SIZE) for _ in range(count)]

    shared = tokens(40)
    return [
        tokens(1),
        tokens(5),
        shared + tokens(3),
        tokens(33),
        shared + tokens(20),
        shared[:20] + tokens(9),
        tokens(16),
    ]


def generate_with_transformers(folder: Path, prompts: list[list[int]], end_token_ids: list[int]) -> list[list[int]]:
    """Return each prompt's greedy continuation in float32, each prompt alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        greedy = transformers.GenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=end_token_ids, pad_token_id=0
        )
        # A checkpoint's own generation config would fill in what is not given.
        model.generation_config = greedy
        with torch.inference_mode():
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
        outputs.append(whole[0, len(prompt) :].tolist())
    return outputs
