"""Tiny models of Gemma 2, Gemma 4, Falcon-H1, Qwen3.5 and of families with experts, for the tests of all families."""

from __future__ import annotations

from typing import Any, Final

from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

NEAR, FULL = "sliding_attention", "full_attention"
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
# Windows in two layers of three, two of which read the cache of others; sparse gates; tokens without per-layer inputs.
GEMMA3N: Final[dict[str, Any]] = {
    **_HEADS,
    "num_hidden_layers": 6,
    "layer_types": [NEAR, FULL, NEAR, FULL, NEAR, FULL],
    "num_kv_shared_layers": 2,
    "sliding_window": 9,
    "intermediate_size": [96, 96, 64, 64, 96, 96],
    "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.0, 0.0],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 190,
    "laurel_rank": 12,
    "final_logit_softcapping": 6.0,
}
GEMMA_CASES: Final[dict[str, tuple[type, type, dict[str, Any]]]] = {
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {
            **_HEADS,
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "query_pre_attn_scalar": 20,
            # So small that most scores feel them.
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 6.0,
        },
    ),
    "gemma3n": (Gemma3nTextConfig, Gemma3nForCausalLM, GEMMA3N),
    "gemma3n-options": (
        Gemma3nTextConfig,
        Gemma3nForCausalLM,
        GEMMA3N
        | {
            "altup_num_inputs": 3,
            "altup_correct_scale": False,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": 211,
            "tie_word_embeddings": False,
        },
    ),
    # Two layers of each kind read the cache of another; two shapes of heads.
    "gemma4": (
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {
            **_HEADS,
            "global_head_dim": 32,
            "num_hidden_layers": 8,
            "layer_types": [NEAR, NEAR, FULL, NEAR, NEAR, NEAR, FULL, FULL],
            "num_kv_shared_layers": 4,
            "sliding_window": 9,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 211,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 6.0,
        },
    ),
    # Experts beside the MLPs.
    "gemma4-moe": (
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {
            **_HEADS,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_hidden_layers": 3,
            "layer_types": [NEAR, FULL, FULL],
            "sliding_window": 9,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    # Values are the keys before norm and rotation; nothing is shared, and layers are told nothing.
    "gemma4-keys-as-values": (
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 1,
            "head_dim": 16,
            "global_head_dim": 24,
            "num_hidden_layers": 3,
            "layer_types": [NEAR, FULL, FULL],
            "sliding_window": 16,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.4,
                    "rope_theta": 1e5,
                    "factor": 2.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        },
    ),
}

# Every multiplier is another number; what multiplies inputs comes without biases.
FALCON: Final[dict[str, Any]] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_d_state": 16,
    "embedding_multiplier": 5.65,
    "lm_head_multiplier": 0.3,
    "key_multiplier": 0.4,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.35, 0.25, 0.36, 0.5, 0.7],
    "ssm_out_multiplier": 0.24,
    "mlp_multipliers": [0.88, 0.6],
}
FALCON_OPTIONS: Final[dict[str, Any]] = {
    "num_key_value_heads": 1,
    "mamba_d_ssm": None,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_conv": 3,
    "mamba_expand": 1,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "mamba_conv_bias": False,
    **dict.fromkeys(("mamba_proj_bias", "projectors_bias", "attention_bias", "mlp_bias", "tie_word_embeddings"), True),
}
FALCON_INPUTS: Final = {"attention_in_multiplier": 1.2, "ssm_in_multiplier": 1.25}
FALCON_CASES: Final[dict[str, tuple[type, type, dict[str, Any]]]] = {
    "falcon-h1": (FalconH1Config, FalconH1ForCausalLM, FALCON | FALCON_INPUTS),
    "falcon-h1-options": (FalconH1Config, FalconH1ForCausalLM, FALCON | FALCON_OPTIONS),
}

QWEN3_5_CASES: Final[dict[str, tuple[type, type, dict[str, Any]]]] = {
    # Two value heads to a key head, of another size; a quarter of each attention head turns.
    "qwen3.5": (
        Qwen3_5TextConfig,
        Qwen3_5ForCausalLM,
        {
            **_HEADS,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            # Now and then a random head reads next to nothing: a smaller one would make much of its rounding.
            "rms_norm_eps": 1e-3,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-options": (
        Qwen3_5TextConfig,
        Qwen3_5ForCausalLM,
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "layer_types": ["full_attention", "linear_attention"],
            "num_hidden_layers": 2,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "partial_rotary_factor": 0.5,
                "mrope_interleaved": True,
                "mrope_section": [2, 2, 2],
            },
        },
    ),
}

PHI3: Final[dict[str, Any]] = {"num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PHI3_CASES: Final[dict[str, tuple[type, type, dict[str, Any]]]] = {
    "phi3": (Phi3Config, Phi3ForCausalLM, PHI3 | {"sliding_window": 13, "original_max_position_embeddings": 256}),
    # All prompts of the tests are long ones, but for those of one token, which nothing turns.
    "phi3-longrope": (
        Phi3Config,
        Phi3ForCausalLM,
        PHI3
        | {
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 8,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.0, 1.5, 1.5, 2.0, 3.0],
                "long_factor": [1.0, 1.25, 2.5, 4.0, 8.0, 16.0],
            },
        },
    ),
}

EXPERT_CASES: Final[dict[str, tuple[type, type, dict[str, Any]]]] = {
    # A window in every second layer, and a rotation whose ramp ends between two frequencies.
    "gpt-oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 12,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "gpt-oss-options": (
        GptOssConfig,
        GptOssForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 24,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "sliding_window": 7,
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    # Prompts cross borders of chunks, and positions at which the temperature changes; experts in every second layer.
    "llama4": (
        Llama4TextConfig,
        Llama4ForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 16,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "intermediate_size": 40,
            "intermediate_size_mlp": 72,
            "floor_scale": 10,
            "attn_scale": 0.4,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    # What sees chunks is not what turns; chunks are no multiple of a block.
    "llama4-options": (
        Llama4TextConfig,
        Llama4ForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 1, 0],
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
            "attention_chunk_size": 7,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "moe_layers": [0, 2],
            "intermediate_size_mlp": 40,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    # A shared expert beside the others, and a factor of what they give together.
    "granite4-moe": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "shared_intermediate_size": 48,
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": 20},
    ),
    "qwen3-moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "num_hidden_layers": 4,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
        },
    ),
    # Delta nets and gated attention, a shared expert of another width than the others.
    "qwen3.5-moe": (
        Qwen3_5MoeTextConfig,
        Qwen3_5MoeForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "rms_norm_eps": 1e-3,
        },
    ),
    # Two value heads to a key head, whose rows are together.
    "qwen3-next": (
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
            "rms_norm_eps": 1e-2,
        },
    ),
    # Experts after the first layer, which are not chosen by the scores that weigh them.
    "lfm2-moe": (
        Lfm2MoeConfig,
        Lfm2MoeForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "lfm2-moe-options": (
        Lfm2MoeConfig,
        Lfm2MoeForCausalLM,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "conv", "full_attention"],
            "num_dense_layers": 0,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
            "use_expert_bias": False,
            "routed_scaling_factor": 1.5,
            "conv_bias": True,
            "tie_word_embeddings": False,
        },
    ),
}
